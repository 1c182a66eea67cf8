"""The Granite 3 decoder (IBM 2024). It is Llama with scaled embeddings, attention scores, layer
outputs and logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import ark
from ark.models.config import LlamaConfig, read_common
from ark.models.fields import Fields
from ark.models.llama import Attention, FeedForward, Head, Layer, Llama


@dataclass(frozen=True)
class GraniteConfig(LlamaConfig):
    """The additional fields of Granite's config: factors of the embeddings, of the attention
    scores, and of the outputs of attention and of the feed-forward part. The logits are divided by
    logits_scaling.
    """

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


class GraniteAttention(Attention):
    """Attention with a configured scale of its scores."""

    def __init__(self, c: GraniteConfig, dtype: ark.DataType, number: int) -> None:
        super().__init__(c, dtype, number)
        self.scale = c.attention_multiplier * c.rope.attention_factor**2


class GraniteLayer(Layer):
    """A layer that multiplies the outputs of attention and of the feed-forward part by a factor."""

    def __init__(
        self, c: GraniteConfig, dtype: ark.DataType, attention: Attention, mlp: ark.Module
    ) -> None:
        super().__init__(c, dtype, attention, mlp)
        self.multiplier = c.residual_multiplier

    def forward(self, h: ark.Tensor, state: ark.TokenState, frequencies: ark.Tensor) -> ark.Tensor:
        x = ark.rmsnorm(h, self.attention_norm, self.eps)
        h = h + self.attention(x, state, frequencies) * self.multiplier
        fed: ark.Tensor = self.mlp(ark.rmsnorm(h, self.mlp_norm, self.eps))
        return h + fed * self.multiplier


class GraniteHead(Head):
    """Computes logits and divides them by logits_scaling."""

    def __init__(self, c: GraniteConfig, dtype: ark.DataType) -> None:
        super().__init__(c, dtype)
        self.scaling = c.logits_scaling

    def forward(self, x: ark.Tensor) -> ark.Tensor:
        return ark.div(ark.linear(x, self.weight), self.scaling, name="logits")


class Granite(Llama):
    """The decoder."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Llama.DEFAULTS,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    }

    def __init__(self, c: GraniteConfig, dtype: ark.DataType) -> None:
        super().__init__(c, dtype)
        self.multiplier = c.embedding_multiplier

    def layer(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> Layer:
        assert isinstance(c, GraniteConfig)
        return GraniteLayer(c, dtype, GraniteAttention(c, dtype, number), FeedForward(c, dtype))

    def head_of(self, c: LlamaConfig, dtype: ark.DataType) -> Head:
        assert isinstance(c, GraniteConfig)
        return GraniteHead(c, dtype)

    def embedded(self, state: ark.TokenState, rows: int) -> ark.Tensor:
        return super().embedded(state, rows) * self.multiplier

    @classmethod
    def read_config(cls, fields: Fields) -> GraniteConfig:
        """The shape of a model from its config.json, with the factors that only this architecture
        has.
        """
        return GraniteConfig(
            **vars(read_common(fields)),
            embedding_multiplier=fields.number("embedding_multiplier"),
            attention_multiplier=fields.number("attention_multiplier"),
            residual_multiplier=fields.number("residual_multiplier"),
            logits_scaling=fields.number("logits_scaling"),
        )
