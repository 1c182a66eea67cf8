"""The DeepSeek-V2 and V3 decoders (DeepSeek-AI 2024). Keys and values are one latent row that all
heads share. Experts are chosen from the best groups of experts, and shared experts are added. The
first layers are dense.

Keys and values are never computed from the latent rows. Instead, a head's key projection is applied
to its query, and its value projection to the result of attention. So the cache stores only latent
rows: the latent values, followed by the rotated part of keys.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import ark
from ark.errors import ModelError, UnsupportedError
from ark.models.config import LlamaConfig, read_common
from ark.models.fields import Fields
from ark.models.llama import Attention, FeedForward, Layer, Llama
from ark.models.mixtral import Experts, MixtureConfig, read_mixture
from ark.models.stored import Stored

LATENT_NORM_EPS = 1e-6  # eps of norms of latent rows and queries, instead of rms_norm_eps


@dataclass(frozen=True)
class DeepseekConfig(MixtureConfig):
    """The additional fields of DeepSeek's config. query_rank: the rank of the low-rank query
    projection, 0 if it is a single matrix. latent_rank: the elements of a latent row that are not
    rotated. plain_dim, value_dim: for each head, the elements of queries that are not rotated, and
    the elements of values; head_dim: the elements of queries that are rotated. score_factor:
    multiplies all attention scores. interleaved: True if rotated pairs are neighbours.
    dense_layers: the number of first layers without experts. shared_size: rows of the shared
    experts' gates. groups: the number of groups of experts. best_groups: the number of groups from
    which experts are chosen. score_scale: multiplies the experts' scores.
    """

    query_rank: int = 0
    latent_rank: int = 512
    plain_dim: int = 128
    value_dim: int = 128
    score_factor: float = 1.0
    interleaved: bool = True
    dense_layers: int = 0
    shared_size: int = 1
    groups: int = 1
    best_groups: int = 1
    score_scale: float = 1.0

    @property
    def inner_size(self) -> int:
        return math.gcd(self.expert_size, self.shared_size, self.intermediate_size)

    @property
    def split_heads(self) -> int:
        return self.num_attention_heads

    @property
    def cache_rows(self) -> tuple[int, int]:
        return 1, self.latent_rank + self.head_dim


class LatentAttention(Attention):
    """Attention of all heads over one cache of latent rows (multi-head latent attention)."""

    SPLIT: ClassVar[dict[str, int]] = {"query": -2, "key_up": 0, "value_up": 0, "output": -1}

    def __init__(self, c: DeepseekConfig, dtype: ark.DataType, number: int) -> None:
        ark.Module.__init__(self)
        self.heads, self.eps = c.num_attention_heads, LATENT_NORM_EPS
        self.cache_type = c.cache_type(dtype)
        self.plain, self.rotary, self.latent_rank = c.plain_dim, c.head_dim, c.latent_rank
        width = c.plain_dim + c.head_dim
        self.scale = width**-0.5 * c.score_factor
        self.factor, self.interleaved = c.rope.attention_factor**2, c.interleaved
        self.query_down: ark.Tensor | None = None
        if c.query_rank:
            self.query_down = ark.parameter((c.query_rank, c.hidden_size), dtype)
            self.query_norm = ark.parameter((c.query_rank,), dtype)
        self.query = ark.parameter((self.heads * width, c.query_rank or c.hidden_size), dtype)
        self.latent = ark.parameter((c.latent_rank + c.head_dim, c.hidden_size), dtype)
        self.latent_norm = ark.parameter((c.latent_rank,), dtype)
        self.key_up = ark.parameter((self.heads, c.latent_rank, c.plain_dim), dtype)
        self.value_up = ark.parameter((self.heads, c.value_dim, c.latent_rank), dtype)
        self.output = ark.parameter((c.hidden_size, self.heads * c.value_dim), dtype)

    def split_heads(self, ranks: int) -> None:
        self.heads //= ranks

    def setup(self, context: int, batch: int = 1) -> None:
        self.keys = ark.tensor((batch, context, self.latent_rank + self.rotary), self.cache_type)

    def setup_pages(self, context: int, pool: int, page: int, apart: bool) -> None:
        self.apart = apart
        self.keys = ark.tensor((pool, 1, page, self.latent_rank + self.rotary), self.cache_type)

    def forward(self, x: ark.Tensor, state: ark.TokenState, frequencies: ark.Tensor) -> ark.Tensor:
        rows, heads, rank = x.shape()[0], self.heads, self.latent_rank
        position, pages = state.position, state.pages
        query = self.queries(x, position, frequencies)
        latent = ark.linear(x, self.latent)
        turned = self.rotated(latent[:, rank:], position, frequencies)
        row = ark.concat(
            [ark.rmsnorm(latent[:, :rank], self.latent_norm, self.eps), turned], axis=1
        )
        if pages is None:
            keys = ark.kv_append(self.keys, row, position)
            a = ark.attention(query, keys, keys, position, scale=self.scale)
        else:
            apart = self.apart and position.shape() == [rows]
            keys = ark.paged_append(self.keys, row, pages, position, apart=apart)
            a = ark.paged_attention(query, keys, keys, pages, position, scale=self.scale)
        latents = ark.reshape(a, (rows, heads, rank + self.rotary))[:, :, :rank]
        values = ark.expert_linear(latents, self.value_up, self.numbers(rows))
        return ark.linear(ark.reshape(values, (rows, heads * values.shape()[2])), self.output)

    def queries(self, x: ark.Tensor, position: ark.Tensor, frequencies: ark.Tensor) -> ark.Tensor:
        """Queries in the space of latent rows, (rows, heads * (latent_rank + rotary))."""
        rows, heads = x.shape()[0], self.heads
        if self.query_down is not None:
            x = ark.rmsnorm(ark.linear(x, self.query_down), self.query_norm, self.eps)
        query = ark.reshape(ark.linear(x, self.query), (rows, heads, self.plain + self.rotary))
        turned = ark.reshape(query[:, :, self.plain :], (rows, heads * self.rotary))
        turned = self.rotated(turned, position, frequencies)
        if self.factor != 1:
            turned = turned * self.factor
        plain = ark.expert_linear(query[:, :, : self.plain], self.key_up, self.numbers(rows))
        whole = ark.concat([plain, ark.reshape(turned, (rows, heads, self.rotary))], axis=2)
        return ark.reshape(whole, (rows, heads * (self.latent_rank + self.rotary)))

    def rotated(self, x: ark.Tensor, position: ark.Tensor, frequencies: ark.Tensor) -> ark.Tensor:
        return ark.rotary_embedding(x, position, frequencies, interleaved=self.interleaved)

    def numbers(self, rows: int) -> ark.Tensor:
        """The number of each head, repeated for each row, as ark.expert_linear expects the numbers
        of experts. Each head is treated as an expert with its own matrix.
        """
        return ark.iota((rows, self.heads), 1, ark.int32)


class DeepseekExperts(Experts):
    """Experts that are chosen from the best groups, and shared experts, which process all rows."""

    SPLIT: ClassVar[dict[str, int]] = {
        **Experts.SPLIT,
        **{f"shared_{name}": axis for name, axis in FeedForward.SPLIT.items()},
    }

    def __init__(self, c: DeepseekConfig, dtype: ark.DataType) -> None:
        super().__init__(c, dtype)
        self.groups, self.best_groups, self.score_scale = c.groups, c.best_groups, c.score_scale
        self.shared_gate = ark.parameter((c.shared_size, c.hidden_size), dtype)
        self.shared_up = ark.parameter((c.shared_size, c.hidden_size), dtype)
        self.shared_down = ark.parameter((c.hidden_size, c.shared_size), dtype)

    def forward(self, x: ark.Tensor) -> ark.Tensor:
        gated = self.gated(ark.linear(x, self.shared_gate), ark.linear(x, self.shared_up))
        return super().forward(x) + ark.linear(gated, self.shared_down)

    def routed(self, x: ark.Tensor) -> tuple[ark.Tensor, ark.Tensor]:
        scores = ark.softmax(ark.linear(x, self.router))
        values, experts = ark.topk(self.of_groups(scores, 1, 0.0), self.chosen)
        return values * self.score_scale, experts

    def of_groups(self, scores: ark.Tensor, best: int, fill: float) -> ark.Tensor:
        """The scores, with the scores outside of the best groups replaced by `fill`. A group's
        rating is the sum of its `best` highest scores.
        """
        if self.groups == self.best_groups:
            return scores
        rows, experts = scores.shape()
        each = experts // self.groups
        highest, _ = ark.topk(ark.reshape(scores, (rows * self.groups, each)), best)
        sums = ark.reshape(ark.reduce_sum(highest, axis=-1), (rows, self.groups))
        values, _ = ark.topk(sums, self.best_groups)
        taken = ark.greater_equal(sums, values[:, self.best_groups - 1 :])
        parted = ark.reshape(scores, (rows, self.groups, each))
        kept = ark.where(ark.reshape(taken, (rows, self.groups, 1)), parted, fill)
        return ark.reshape(kept, (rows, experts))


class Deepseek3Experts(DeepseekExperts):
    """Experts whose scores are sigmoids. A correction is added to the scores when experts are
    chosen, but not to the experts' weights.
    """

    def __init__(self, c: DeepseekConfig, dtype: ark.DataType) -> None:
        super().__init__(c, dtype)
        self.correction = ark.parameter((c.experts,), ark.fp32)

    def routed(self, x: ark.Tensor) -> tuple[ark.Tensor, ark.Tensor]:
        scores = ark.sigmoid(ark.linear(x, self.router))
        _, experts = ark.topk(self.of_groups(scores + self.correction, 2, -math.inf), self.chosen)
        values = ark.gather_elements(scores, experts, axis=1)
        if self.normalised:
            values = ark.div(values, ark.reduce_sum(values, axis=-1) + 1e-20)
        return values * self.score_scale, experts


class DeepseekV2(Llama):
    """The decoder of DeepSeek-V2."""

    EXPERTS: ClassVar[type[DeepseekExperts]] = DeepseekExperts
    UNQUANTIZED: ClassVar[tuple[str, ...]] = (
        *Llama.UNQUANTIZED,
        *(
            f"layers.{{}}.{name}"
            for name in ("mlp.router", "attention.key_up", "attention.value_up")
        ),
    )
    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Llama.DEFAULTS,
        "vocab_size": 102400,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "n_group": None,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.0,
        "topk_group": None,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "v_head_dim": 128,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
        "rope_interleave": True,
    }
    WEIGHTS: ClassVar[dict[str, str]] = {
        **Llama.WEIGHTS,
        **{
            f"layers.{{}}.attention.{name}": f"model.layers.{{}}.self_attn.{stored}.weight"
            for name, stored in (
                ("query_down", "q_a_proj"),
                ("query_norm", "q_a_layernorm"),
                ("query", "q_b_proj"),
                ("latent", "kv_a_proj_with_mqa"),
                ("latent_norm", "kv_a_layernorm"),
                ("key_up", "kv_b_proj"),
                ("value_up", "kv_b_proj"),
            )
        },
        "layers.{}.mlp.router": "model.layers.{}.mlp.gate.weight",
        "layers.{}.mlp.correction": "model.layers.{}.mlp.gate.e_score_correction_bias",
        **{
            f"layers.{{}}.mlp.{own}": f"model.layers.{{}}.mlp.{part}_proj.weight"
            for name in ("gate", "up", "down")
            for own, part in (
                (f"{name}.{{}}", f"experts.{{}}.{name}"),
                (f"shared_{name}", f"shared_experts.{name}"),
            )
        },
    }

    def layer(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> Layer:
        assert isinstance(c, DeepseekConfig)
        dense = number < c.dense_layers
        mlp = FeedForward(c, dtype) if dense else self.EXPERTS(c, dtype)
        return Layer(c, dtype, LatentAttention(c, dtype, number), mlp)

    @classmethod
    def stored_name(cls, c: LlamaConfig, parameter: str) -> str:
        assert isinstance(c, DeepseekConfig)
        whole = parameter == "layers.{}.attention.query" and not c.query_rank
        return Llama.WEIGHTS[parameter] if whole else cls.WEIGHTS[parameter]

    @classmethod
    def stored(cls, c: LlamaConfig, parameter: str) -> Stored | None:
        """Describes which part of a stored tensor a parameter is; None for a whole tensor. A head's
        projections of keys and values are next to each other in one stored matrix.
        """
        assert isinstance(c, DeepseekConfig)
        rows = c.plain_dim + c.value_dim
        if parameter.endswith(".key_up"):
            return Stored(range(c.plain_dim), rows, axis=2, transposed=True, folded=True)
        if parameter.endswith(".value_up"):
            return Stored(range(c.plain_dim, rows), rows, axis=1, folded=True)
        return None

    @classmethod
    def unused(cls, c: LlamaConfig, stored_name: str) -> bool:
        """True for a tensor that the decoder does not use: those of layers beyond the last one,
        which are for the prediction of several tokens.
        """
        layer = re.match(r"model\.layers\.(\d+)\.", stored_name)
        return layer is not None and int(layer[1]) >= c.num_hidden_layers

    @classmethod
    def read_config(cls, fields: Fields) -> LlamaConfig:
        """The shape of a model from its config.json, with the fields that only this architecture
        has.
        """
        rotary = fields.size("qk_rope_head_dim")
        fields = Fields(fields.source, {**fields.values, "head_dim": rotary})
        common = read_common(fields)
        # With latent attention the model has one key/value head, because all heads share the cache.
        common = replace(common, num_key_value_heads=1)
        name = "num_local_experts" if "num_local_experts" in fields.values else "n_routed_experts"
        experts, size = fields.size(name), fields.size("moe_intermediate_size")
        normalised = fields.flag("norm_topk_prob")
        groups, best = cls.groups(fields, experts)
        return DeepseekConfig(
            **vars(read_mixture(fields, common, experts, size, normalised)),
            query_rank=fields.size("q_lora_rank") if fields.get("q_lora_rank") is not None else 0,
            latent_rank=fields.size("kv_lora_rank"),
            plain_dim=fields.size("qk_nope_head_dim"),
            value_dim=fields.size("v_head_dim"),
            score_factor=_score_factor(fields),
            interleaved=fields.flag("rope_interleave"),
            dense_layers=fields.count("first_k_dense_replace"),
            shared_size=size * fields.size("n_shared_experts"),
            groups=groups,
            best_groups=best,
            score_scale=fields.number("routed_scaling_factor"),
        )

    @classmethod
    def groups(cls, fields: Fields, experts: int) -> tuple[int, int]:
        """The number of groups of experts, and the number of groups from which experts are
        chosen.
        """
        method = fields.text("topk_method")
        if method == "greedy":
            return 1, 1
        if method != "group_limited_greedy":
            raise UnsupportedError(
                f"{fields.source}: topk_method is {method!r}, but ark chooses experts by 'greedy' "
                "or 'group_limited_greedy'. Use a checkpoint with one of these."
            )
        return _groups(fields, experts)


class DeepseekV3(DeepseekV2):
    """The decoder of DeepSeek-V3 and R1."""

    EXPERTS: ClassVar[type[DeepseekExperts]] = Deepseek3Experts
    DEFAULTS: ClassVar[dict[str, Any]] = {
        **DeepseekV2.DEFAULTS,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
    }

    @classmethod
    def groups(cls, fields: Fields, experts: int) -> tuple[int, int]:
        return _groups(fields, experts)


def _groups(fields: Fields, experts: int) -> tuple[int, int]:
    groups, best = fields.size("n_group"), fields.size("topk_group")
    if experts % groups or best > groups:
        raise ModelError(
            f"{fields.source}: n_group is {groups} and topk_group {best}; n_group must divide the "
            f"{experts} experts, and topk_group must be at most n_group. Correct these fields."
        )
    return groups, best


def _score_factor(fields: Fields) -> float:
    """The factor of attention scores that follows from yarn's `mscale_all_dim`."""
    table = fields.table("rope_scaling") or fields.table("rope_parameters")
    if table is None or not table.get("mscale_all_dim"):
        return 1.0
    if (table.text("rope_type") or table.text("type") or "default") == "default":
        return 1.0
    factor = table.number("factor")
    scale = 0.1 * table.number("mscale_all_dim") * math.log(factor) + 1 if factor > 1 else 1.0
    return scale * scale
