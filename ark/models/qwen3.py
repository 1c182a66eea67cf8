"""The Qwen3 decoder (Qwen team 2025): Llama with a norm of each head of queries and keys."""

from __future__ import annotations

from typing import ClassVar

import ark
from ark.models.config import LlamaConfig
from ark.models.llama import Attention, FeedForward, Layer, Llama


class Qwen3Attention(Attention):
    """Attention whose queries and keys are normed head by head."""

    def __init__(self, c: LlamaConfig, dtype: ark.DataType) -> None:
        super().__init__(c, dtype)
        self.eps = c.rms_norm_eps
        self.query_norm = ark.parameter((c.head_dim,), dtype)
        self.key_norm = ark.parameter((c.head_dim,), dtype)

    def projections(self, x: ark.Tensor) -> tuple[ark.Tensor, ark.Tensor, ark.Tensor]:
        query, key, value = super().projections(x)
        return self.normed(query, self.query_norm), self.normed(key, self.key_norm), value

    def normed(self, x: ark.Tensor, weight: ark.Tensor) -> ark.Tensor:
        """Each head of each row by itself."""
        rows, columns = x.shape()
        heads = ark.reshape(x, (rows, columns // self.head_dim, self.head_dim))
        return ark.reshape(ark.rmsnorm(heads, weight, self.eps), (rows, columns))


class Qwen3(Llama):
    """The decoder."""

    WEIGHTS: ClassVar[dict[str, str]] = {
        **Llama.WEIGHTS,
        "layers.{}.attention.query_norm": "model.layers.{}.self_attn.q_norm.weight",
        "layers.{}.attention.key_norm": "model.layers.{}.self_attn.k_norm.weight",
    }

    def layer(self, c: LlamaConfig, dtype: ark.DataType) -> Layer:
        return Layer(c, dtype, Qwen3Attention(c, dtype), FeedForward(c, dtype))
