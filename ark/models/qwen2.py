"""The Qwen2 and Qwen2.5 decoder (Qwen team 2024): Llama with biases of queries, keys and values."""

from __future__ import annotations

from typing import Any, ClassVar

import ark
from ark.models.config import ConfigT, LlamaConfig, asked_window, sliding_layers
from ark.models.fields import Fields
from ark.models.llama import Attention, FeedForward, Layer, Llama


class BiasedAttention(Attention):
    """Attention whose queries, keys and values have biases. The biases are fp32, like the sums to
    which they are added.
    """

    def __init__(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> None:
        super().__init__(c, dtype, number)
        self.query_bias = ark.parameter((c.query_size,), ark.fp32)
        self.key_bias = ark.parameter((c.kv_size,), ark.fp32)
        self.value_bias = ark.parameter((c.kv_size,), ark.fp32)

    def projections(self, x: ark.Tensor) -> tuple[ark.Tensor, ark.Tensor, ark.Tensor]:
        query, key, value = super().projections(x)
        return query + self.query_bias, key + self.key_bias, value + self.value_bias


BIASES = {
    f"layers.{{}}.attention.{name}_bias": f"model.layers.{{}}.self_attn.{name[0]}_proj.bias"
    for name in ("query", "key", "value")
}
"""The entries of WEIGHTS for the biases of BiasedAttention."""


def late_layers_slide(config: ConfigT, fields: Fields) -> ConfigT:
    """The config with the sliding window for the layers that `layer_types` marks as sliding. If the
    field is absent, the layers from number `max_window_layers` on have the window.
    """
    window, first = asked_window(fields), 0
    if window and fields.get("layer_types") is None:
        first = fields.count("max_window_layers")
    usual = [bool(window) and n >= first for n in range(config.num_hidden_layers)]
    return sliding_layers(config, fields, window, usual)


class Qwen2(Llama):
    """The decoder."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Llama.DEFAULTS,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    }
    WEIGHTS: ClassVar[dict[str, str]] = {**Llama.WEIGHTS, **BIASES}

    def layer(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> Layer:
        return Layer(c, dtype, BiasedAttention(c, dtype, number), FeedForward(c, dtype))

    @classmethod
    def read_config(cls, fields: Fields) -> LlamaConfig:
        """The shape of a model from its config.json. `late_layers_slide` determines which layers
        have the sliding window.
        """
        return late_layers_slide(super().read_config(fields), fields)
