"""The Qwen3 decoder (Qwen team 2025): Llama with a norm on each head of queries and keys."""

from __future__ import annotations

from typing import Any, ClassVar

import ark
from ark.models.config import LlamaConfig
from ark.models.fields import Fields
from ark.models.llama import Attention, FeedForward, Layer, Llama
from ark.models.qwen2 import Qwen2, late_layers_slide


class Qwen3Attention(Attention):
    """Attention in which each head of queries and keys is normalised."""

    def __init__(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> None:
        super().__init__(c, dtype, number)
        self.eps = c.rms_norm_eps
        self.query_norm = ark.parameter((c.head_dim,), dtype)
        self.key_norm = ark.parameter((c.head_dim,), dtype)

    def projections(self, x: ark.Tensor) -> tuple[ark.Tensor, ark.Tensor, ark.Tensor]:
        query, key, value = super().projections(x)
        return self.normed(query, self.query_norm), self.normed(key, self.key_norm), value

    def normed(self, x: ark.Tensor, weight: ark.Tensor) -> ark.Tensor:
        """Normalises each head of each row separately."""
        rows, columns = x.shape()
        heads = ark.reshape(x, (rows, columns // self.head_dim, self.head_dim))
        return ark.reshape(ark.rmsnorm(heads, weight, self.eps), (rows, columns))


class Qwen3(Llama):
    """The decoder."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Qwen2.DEFAULTS,
        "head_dim": 128,
    }
    WEIGHTS: ClassVar[dict[str, str]] = {
        **Llama.WEIGHTS,
        "layers.{}.attention.query_norm": "model.layers.{}.self_attn.q_norm.weight",
        "layers.{}.attention.key_norm": "model.layers.{}.self_attn.k_norm.weight",
    }

    def layer(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> Layer:
        return Layer(c, dtype, Qwen3Attention(c, dtype, number), FeedForward(c, dtype))

    @classmethod
    def read_config(cls, fields: Fields) -> LlamaConfig:
        """The shape of a model from its config.json. The layers with the sliding window are
        determined as in Qwen2.
        """
        return late_layers_slide(super().read_config(fields), fields)
