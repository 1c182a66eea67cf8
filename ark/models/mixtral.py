"""The Mixtral decoder (Jiang et al. 2024). It is Llama with a mixture of experts as feed-forward
part. A few of the experts process each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import ark
from ark.errors import ModelError
from ark.models.config import LlamaConfig, one_window, read_common
from ark.models.fields import Fields
from ark.models.llama import Attention, FeedForward, Gated, Layer, Llama


@dataclass(frozen=True)
class MixtureConfig(LlamaConfig):
    """The additional fields of a mixture's config. experts: the number of experts in a layer.
    experts_per_token: the number of experts that are chosen for each row. normalised: True if the
    weights of the chosen experts add up to 1. expert_size: the rows of an expert's gate and up
    projections.
    """

    experts: int = 1
    experts_per_token: int = 1
    normalised: bool = True
    expert_size: int = 1

    @property
    def inner_size(self) -> int:
        return self.expert_size


def read_mixture(
    fields: Fields, common: LlamaConfig, experts: int, expert_size: int, normalised: bool
) -> MixtureConfig:
    """Adds the fields of experts to `common`."""
    chosen = fields.size("num_experts_per_tok")
    if chosen > experts:
        raise ModelError(
            f"{fields.source}: num_experts_per_tok is {chosen}, but there are {experts} "
            "experts. Correct num_experts_per_tok."
        )
    return MixtureConfig(
        **vars(common),
        experts=experts,
        experts_per_token=chosen,
        normalised=normalised,
        expert_size=expert_size,
    )


class Experts(Gated):
    """The gated perceptrons of the experts with the highest router scores. Their results are added
    up, with the scores as weights.
    """

    SPLIT: ClassVar[dict[str, int]] = FeedForward.SPLIT

    def __init__(self, c: MixtureConfig, dtype: ark.DataType) -> None:
        super().__init__()
        self.chosen, self.normalised = c.experts_per_token, c.normalised
        self.router = ark.parameter((c.experts, c.hidden_size), dtype)
        self.gate = ark.parameter((c.experts, c.expert_size, c.hidden_size), dtype)
        self.up = ark.parameter((c.experts, c.expert_size, c.hidden_size), dtype)
        self.down = ark.parameter((c.experts, c.hidden_size, c.expert_size), dtype)

    def forward(self, x: ark.Tensor) -> ark.Tensor:
        scores, experts = self.routed(x)
        gate = self.product(x, "gate", experts)
        gated = self.gated(gate, self.product(x, "up", experts))
        outputs = self.product(gated, "down", experts)
        rows = x.shape()[0]
        weighted = ark.mul(outputs, ark.reshape(scores, (rows, self.chosen, 1)))
        return ark.reduce_sum(weighted, axis=1, keepdims=False)

    def routed(self, x: ark.Tensor) -> tuple[ark.Tensor, ark.Tensor]:
        """The experts of each row: their scores and their numbers, (rows, chosen) each."""
        scores, experts = ark.topk(ark.softmax(ark.linear(x, self.router)), self.chosen)
        if self.normalised:
            scores = ark.div(scores, ark.reduce_sum(scores, axis=-1))
        return scores, experts

    def product(self, x: ark.Tensor, name: str, experts: ark.Tensor) -> ark.Tensor:
        """The products of each row with the weights `name` of its experts, (rows, chosen,
        outputs).
        """
        return ark.expert_linear(x, getattr(self, name), experts)


class Mixtral(Llama):
    """The decoder."""

    UNQUANTIZED: ClassVar[tuple[str, ...]] = (*Llama.UNQUANTIZED, "layers.{}.mlp.router")
    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Llama.DEFAULTS,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    WEIGHTS: ClassVar[dict[str, str]] = {
        **Llama.WEIGHTS,
        "layers.{}.mlp.router": "model.layers.{}.block_sparse_moe.gate.weight",
        "layers.{}.mlp.gate.{}": "model.layers.{}.block_sparse_moe.experts.{}.w1.weight",
        "layers.{}.mlp.up.{}": "model.layers.{}.block_sparse_moe.experts.{}.w3.weight",
        "layers.{}.mlp.down.{}": "model.layers.{}.block_sparse_moe.experts.{}.w2.weight",
    }

    def layer(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> Layer:
        assert isinstance(c, MixtureConfig)
        return Layer(c, dtype, Attention(c, dtype, number), Experts(c, dtype))

    @classmethod
    def read_config(cls, fields: Fields) -> MixtureConfig:
        """The shape of a model from its config.json, with the fields of experts. `num_experts` is
        another name of `num_local_experts`.
        """
        name = "num_experts" if "num_experts" in fields.values else "num_local_experts"
        inner = fields.size("intermediate_size")
        common = read_common(fields)
        return one_window(read_mixture(fields, common, fields.size(name), inner, True), fields)
