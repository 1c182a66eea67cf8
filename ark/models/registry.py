"""Which decoder computes an architecture, by the name that config.json gives it.

Classes are found by name, so that reading a config imports no more than the decoder it asks for.
"""

from __future__ import annotations

import importlib
from typing import Any

ARCHITECTURES = {
    "LlamaForCausalLM": "ark.models.llama:Llama",
    "MistralForCausalLM": "ark.models.mistral:Mistral",
    "Qwen2ForCausalLM": "ark.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "ark.models.qwen3:Qwen3",
    "MixtralForCausalLM": "ark.models.mixtral:Mixtral",
    "Qwen3MoeForCausalLM": "ark.models.qwen3_moe:Qwen3Moe",
    "SmolLM3ForCausalLM": "ark.models.smollm3:SmolLm3",
    "Olmo2ForCausalLM": "ark.models.olmo2:Olmo2",
    "GraniteForCausalLM": "ark.models.granite:Granite",
    "Phi3ForCausalLM": "ark.models.phi3:Phi3",
    "Gemma2ForCausalLM": "ark.models.gemma2:Gemma2",
    "Gemma3ForCausalLM": "ark.models.gemma3:Gemma3",
    "GlmForCausalLM": "ark.models.glm4:Glm",
    "Glm4ForCausalLM": "ark.models.glm4:Glm4",
}
"""Module and class by architecture."""

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
}
"""The architecture of a config that names only its model_type."""


def decoder(architecture: str) -> type[Any]:
    """The class of an architecture of `ARCHITECTURES`, a subclass of ark.models.llama.Llama."""
    module, _, name = ARCHITECTURES[architecture].partition(":")
    found: type[Any] = getattr(importlib.import_module(module), name)
    return found
