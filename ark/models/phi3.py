"""The Phi-3 and Phi-4-mini decoder (Abdin et al. 2024). It is Llama with fused weights, optionally
with rotation of a part of each head, and with separate frequencies beyond the original context
(LongRoPE).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

import ark
from ark.models.config import LlamaConfig, one_window, read_common
from ark.models.fields import Fields
from ark.models.llama import Attention, FeedForward, Layer, Llama
from ark.models.rope import Rope
from ark.models.stored import Stored, parts, rotated_first

FUSED = {
    **{f"layers.{{}}.attention.{n}": "self_attn.qkv_proj" for n in ("query", "key", "value")},
    **{f"layers.{{}}.mlp.{n}": "mlp.gate_up_proj" for n in ("gate", "up")},
}


def scales(rope: Rope, head_dim: int) -> np.ndarray:
    """The factor of each element of a query. For rotated elements it is the square of
    attention_factor; then neither queries nor keys need to be multiplied by attention_factor
    separately. For other elements it is 1.
    """
    half = np.ones(head_dim // 2, np.float32)
    half[: rope.rotated(head_dim) // 2] = rope.attention_factor**2
    return np.concatenate([half, half])


class Phi3Attention(Attention):
    """Attention in which rotation may also scale the rotated part of each head."""

    def __init__(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> None:
        super().__init__(c, dtype, number)
        self.scaled = c.rope.partial != 1 and c.rope.attention_factor != 1
        if self.scaled:
            self.scale = c.head_dim**-0.5
            self.scales = ark.parameter((c.head_dim,), ark.fp32)
            self.scales.initializer = lambda: scales(c.rope, c.head_dim)
            self.scales.requires_grad = False

    def projections(self, x: ark.Tensor) -> tuple[ark.Tensor, ark.Tensor, ark.Tensor]:
        query, key, value = super().projections(x)
        if self.scaled:
            rows, columns = query.shape()
            heads = ark.reshape(query, (rows, columns // self.head_dim, self.head_dim))
            query = ark.reshape(heads * self.scales, (rows, columns))
        return query, key, value


class Phi3(Llama):
    """The decoder."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Llama.DEFAULTS,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
        "sliding_window": None,
    }
    WEIGHTS: ClassVar[dict[str, str]] = {
        **Llama.WEIGHTS,
        **{name: f"model.layers.{{}}.{fused}.weight" for name, fused in FUSED.items()},
    }

    def layer(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> Layer:
        return Layer(c, dtype, Phi3Attention(c, dtype, number), FeedForward(c, dtype))

    @classmethod
    def stored(cls, c: LlamaConfig, parameter: str) -> Stored | None:
        query, key, value = parts([c.query_size, c.kv_size, c.kv_size])
        gate, up = parts([c.intermediate_size, c.intermediate_size])
        rotated = c.rope.rotated(c.head_dim)
        stored_as = {
            "attention.query": rotated_first(query, c.head_dim, rotated),
            "attention.key": rotated_first(key, c.head_dim, rotated),
            "attention.value": value,
            "mlp.gate": gate,
            "mlp.up": up,
        }
        return stored_as.get(parameter.removeprefix("layers.{}."))

    @classmethod
    def read_config(cls, fields: Fields) -> LlamaConfig:
        """The shape of a model from its config.json. All layers have the sliding window. In older
        files the type of RoPE scaling `longrope` is called `yarn`.
        """
        table = fields.table("rope_scaling") or fields.table("rope_parameters")
        if table is not None and "yarn" in (table.text("rope_type"), table.text("type")):
            renamed = {**table.values, "rope_type": "longrope"}
            fields = Fields(fields.source, {**fields.values, "rope_scaling": renamed})
        return one_window(read_common(fields, partial=True), fields)
