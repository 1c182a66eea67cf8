"""The OLMo 2 decoder (OLMo team 2024): Llama with norms of queries and keys, and with norms after
attention and after the feed-forward part instead of before.
"""

from __future__ import annotations

from typing import Any, ClassVar

import ark
from ark.models.config import LlamaConfig
from ark.models.llama import Attention, FeedForward, Layer, Llama


class Olmo2Attention(Attention):
    """Attention whose queries and keys are normalised over whole rows."""

    def __init__(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> None:
        super().__init__(c, dtype, number)
        self.eps = c.rms_norm_eps
        self.query_norm = ark.parameter((c.query_size,), dtype)
        self.key_norm = ark.parameter((c.kv_size,), dtype)

    def projections(self, x: ark.Tensor) -> tuple[ark.Tensor, ark.Tensor, ark.Tensor]:
        query, key, value = super().projections(x)
        query = ark.rmsnorm(query, self.query_norm, self.eps)
        return query, ark.rmsnorm(key, self.key_norm, self.eps), value


class Olmo2Layer(Layer):
    """A layer that normalises the outputs of attention and of the feed-forward part."""

    def forward(self, h: ark.Tensor, state: ark.TokenState, frequencies: ark.Tensor) -> ark.Tensor:
        a = self.attention(h, state, frequencies)
        h = h + ark.rmsnorm(a, self.attention_norm, self.eps)
        return h + ark.rmsnorm(self.mlp(h), self.mlp_norm, self.eps)


class Olmo2(Llama):
    """The decoder."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Llama.DEFAULTS,
        "vocab_size": 50304,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": 50279,
    }
    WEIGHTS: ClassVar[dict[str, str]] = {
        **Llama.WEIGHTS,
        "layers.{}.attention_norm": "model.layers.{}.post_attention_layernorm.weight",
        "layers.{}.mlp_norm": "model.layers.{}.post_feedforward_layernorm.weight",
        "layers.{}.attention.query_norm": "model.layers.{}.self_attn.q_norm.weight",
        "layers.{}.attention.key_norm": "model.layers.{}.self_attn.k_norm.weight",
    }

    def layer(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> Layer:
        return Olmo2Layer(c, dtype, Olmo2Attention(c, dtype, number), FeedForward(c, dtype))
