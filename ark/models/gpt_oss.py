"""The gpt-oss decoder (OpenAI 2025). It has attention with biases and sinks, a sliding window in
every other layer, and experts with biases and a clamped gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import ark
from ark.errors import UnsupportedError
from ark.models.config import LlamaConfig, read_common, sliding_layers
from ark.models.fields import Fields
from ark.models.gemma2 import optional_window
from ark.models.llama import Layer, Llama
from ark.models.mixtral import Experts, MixtureConfig, read_mixture
from ark.models.qwen2 import BIASES, BiasedAttention
from ark.models.stored import Stored

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotary embedding that is used if the config has none."""


@dataclass(frozen=True)
class GptOssConfig(MixtureConfig):
    """The additional fields of gpt-oss's config. limit: the largest value of gates, and the largest
    magnitude of up projections; larger ones are clamped. alpha: the factor of the gate inside the
    sigmoid.
    """

    limit: float = 7.0
    alpha: float = 1.702


class GptOssAttention(BiasedAttention):
    """Attention with a sink in each head (a score without a value), and with a bias of the output.

    bias_part: the fraction of the output's bias that this rank adds before the sum over ranks.
    """

    SPLIT: ClassVar[dict[str, int]] = {**BiasedAttention.SPLIT, "sinks": -1}
    bias_part = 1.0

    def __init__(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> None:
        super().__init__(c, dtype, number)
        self.sinks = ark.parameter((c.num_attention_heads,), ark.fp32)
        self.output_bias = ark.parameter((c.hidden_size,), ark.fp32)

    def forward(self, x: ark.Tensor, state: ark.TokenState, frequencies: ark.Tensor) -> ark.Tensor:
        return super().forward(x, state, frequencies) + part(self.output_bias, self.bias_part)


class GptOssExperts(Experts):
    """Experts with biases. The weights of the chosen experts are the softmax of their logits."""

    bias_part = 1.0

    def __init__(self, c: GptOssConfig, dtype: ark.DataType) -> None:
        super().__init__(c, dtype)
        self.limit, self.alpha = c.limit, c.alpha
        self.router_bias = ark.parameter((c.experts,), ark.fp32)
        self.gate_bias = ark.parameter((c.experts, c.expert_size), ark.fp32)
        self.up_bias = ark.parameter((c.experts, c.expert_size), ark.fp32)
        self.down_bias = ark.parameter((c.experts, c.hidden_size), ark.fp32)

    def routed(self, x: ark.Tensor) -> tuple[ark.Tensor, ark.Tensor]:
        logits = ark.linear(x, self.router) + self.router_bias
        values, experts = ark.topk(logits, self.chosen)
        return ark.softmax(values), experts

    def product(self, x: ark.Tensor, name: str, experts: ark.Tensor) -> ark.Tensor:
        bias = getattr(self, f"{name}_bias")
        if name == "down":
            bias = part(bias, self.bias_part)
        return super().product(x, name, experts) + ark.gather(bias, experts, axis=0)

    def gated(self, gate: ark.Tensor, up: ark.Tensor) -> ark.Tensor:
        gate = ark.clip(gate, maximum=self.limit)
        up = ark.clip(up, -self.limit, self.limit)
        return gate * ark.sigmoid(gate * self.alpha) * (up + 1.0)


def part(bias: ark.Tensor, of_all: float) -> ark.Tensor:
    """The part of a bias that one rank adds before a sum over ranks. The sum of all ranks' parts is
    the bias.
    """
    return bias if of_all == 1 else bias * of_all


class GptOss(Llama):
    """The decoder."""

    UNQUANTIZED: ClassVar[tuple[str, ...]] = (*Llama.UNQUANTIZED, "layers.{}.mlp.router")
    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Llama.DEFAULTS,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": YARN,
        "bos_token_id": None,
        "eos_token_id": None,
        "sliding_window": 128,
        "layer_types": None,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "attention_bias": True,
    }
    WEIGHTS: ClassVar[dict[str, str]] = {
        **Llama.WEIGHTS,
        **BIASES,
        "layers.{}.attention.output_bias": "model.layers.{}.self_attn.o_proj.bias",
        "layers.{}.attention.sinks": "model.layers.{}.self_attn.sinks",
        "layers.{}.mlp.router": "model.layers.{}.mlp.router.weight",
        "layers.{}.mlp.router_bias": "model.layers.{}.mlp.router.bias",
        **{
            f"layers.{{}}.mlp.{name}{end}": f"model.layers.{{}}.mlp.experts.{fused}{end}"
            for name, fused in (
                ("gate", "gate_up_proj"),
                ("up", "gate_up_proj"),
                ("down", "down_proj"),
            )
            for end in ("", "_bias")
        },
    }

    def layer(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> Layer:
        assert isinstance(c, GptOssConfig)
        return Layer(c, dtype, GptOssAttention(c, dtype, number), GptOssExperts(c, dtype))

    @classmethod
    def stored(cls, c: LlamaConfig, parameter: str) -> Stored | None:
        """Describes which part of a stored tensor a parameter is; None for a whole tensor. The rows
        of gate and up projections alternate in one tensor. The stored weights of experts have the
        inputs as their first dimension.
        """
        assert isinstance(c, GptOssConfig)
        name = parameter.removeprefix("layers.{}.mlp.")
        size, hidden = 2 * c.expert_size, c.hidden_size
        rows = {"gate": range(0, size, 2), "up": range(1, size, 2), "down": range(hidden)}
        of = rows.get(name.removesuffix("_bias"))
        if of is None:
            return None
        in_all = hidden if name.startswith("down") else size
        return Stored(of, in_all, axis=1, transposed=not name.endswith("_bias"))

    @classmethod
    def read_config(cls, fields: Fields) -> LlamaConfig:
        """The shape of a model from its config.json. Every other layer has the sliding window,
        beginning with the first, unless `layer_types` is given.
        """
        if not fields.flag("attention_bias"):
            raise UnsupportedError(
                f"{fields.source}: attention_bias is false, but ark supports this architecture "
                "only with biases of attention. Use a checkpoint with biases."
            )
        if fields.get("rope_parameters") is not None:
            fields = Fields(fields.source, {**fields.values, "rope_scaling": None})
        name = "num_experts" if "num_experts" in fields.values else "num_local_experts"
        size = fields.size("intermediate_size")
        common = read_common(fields, biased=True)
        mixture = read_mixture(fields, common, fields.size(name), size, True)
        config = GptOssConfig(
            **vars(mixture),
            limit=fields.number("swiglu_limit"),
            alpha=fields.number("swiglu_alpha"),
        )
        usual = [n % 2 == 0 for n in range(config.num_hidden_layers)]
        return sliding_layers(config, fields, optional_window(fields), usual)
