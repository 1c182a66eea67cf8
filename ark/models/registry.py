"""Which decoder computes an architecture, by the name that config.json gives it.

Classes are found by name, so that reading a config imports no more than the decoder it asks for.
"""

from __future__ import annotations

import importlib
from typing import Any

ARCHITECTURES = {
    "LlamaForCausalLM": "ark.models.llama:Llama",
    "MistralForCausalLM": "ark.models.mistral:Mistral",
    "Qwen3ForCausalLM": "ark.models.qwen3:Qwen3",
    "MixtralForCausalLM": "ark.models.mixtral:Mixtral",
    "Qwen3MoeForCausalLM": "ark.models.qwen3_moe:Qwen3Moe",
}
"""Module and class by architecture."""

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""The architecture of a config that names only its model_type."""


def decoder(architecture: str) -> type[Any]:
    """The class of an architecture of `ARCHITECTURES`, a subclass of ark.models.llama.Llama."""
    module, _, name = ARCHITECTURES[architecture].partition(":")
    found: type[Any] = getattr(importlib.import_module(module), name)
    return found
