"""The SmolLM3 decoder (Hugging Face 2025). It is Llama with some layers that do not rotate queries
and keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import ark
from ark.models.config import LlamaConfig, asked_window, read_common, sliding_layers
from ark.models.fields import Fields
from ark.models.llama import Attention, FeedForward, Layer, Llama


@dataclass(frozen=True)
class SmolLm3Config(LlamaConfig):
    """The additional field of SmolLM3's config. rotating: for each layer, True if it rotates
    queries and keys.
    """

    rotating: tuple[bool, ...] = ()


class SmolLm3Attention(Attention):
    """Attention that rotates queries and keys only if its layer is a rotating one."""

    def __init__(self, c: SmolLm3Config, dtype: ark.DataType, number: int) -> None:
        super().__init__(c, dtype, number)
        self.rotating = c.rotating[number]

    def rotated(self, x: ark.Tensor, position: ark.Tensor, frequencies: ark.Tensor) -> ark.Tensor:
        return super().rotated(x, position, frequencies) if self.rotating else x


class SmolLm3(Llama):
    """The decoder."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Llama.DEFAULTS,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "layer_types": None,
    }

    def layer(self, c: LlamaConfig, dtype: ark.DataType, number: int) -> Layer:
        assert isinstance(c, SmolLm3Config)
        return Layer(c, dtype, SmolLm3Attention(c, dtype, number), FeedForward(c, dtype))

    @classmethod
    def read_config(cls, fields: Fields) -> SmolLm3Config:
        """The shape of a model from its config.json. `no_rope_layers` has a 1 for each layer that
        rotates queries and keys; by default all layers do except every `no_rope_layer_interval`th.
        If there is a sliding window, `layer_types` marks the layers that have it; by default these
        are the layers that do not rotate.
        """
        common = read_common(fields)
        count, flags = common.num_hidden_layers, fields.get("no_rope_layers")
        if flags is None:
            interval = fields.size("no_rope_layer_interval")
            flags = [int((n + 1) % interval != 0) for n in range(count)]
        if not isinstance(flags, list) or len(flags) < count or not all(r in (0, 1) for r in flags):
            raise fields.wrong("no_rope_layers", f"a list of {count} times 0 or 1")
        rotating = tuple(map(bool, flags[:count]))
        config = SmolLm3Config(**vars(common), rotating=rotating)
        window = asked_window(fields)
        return sliding_layers(config, fields, window, [not r and bool(window) for r in rotating])
