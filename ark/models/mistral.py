"""The Mistral decoder (Jiang et al. 2023): Llama with an optional sliding window."""

from __future__ import annotations

from typing import Any, ClassVar

from ark.models.config import LlamaConfig, one_window
from ark.models.fields import Fields
from ark.models.llama import Llama


class Mistral(Llama):
    """The decoder."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **Llama.DEFAULTS,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }

    @classmethod
    def read_config(cls, fields: Fields) -> LlamaConfig:
        """The shape of a model from its config.json. All layers have the sliding window."""
        return one_window(super().read_config(fields), fields)
