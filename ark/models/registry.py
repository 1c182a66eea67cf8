"""Which decoder computes an architecture, by the name that config.json gives it.

Classes are found by name, so that reading a config imports no more than the decoder it asks for.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ark.errors import InvalidUsageError, SystemError

ARCHITECTURES: dict[str, str | type[Any]] = {
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
"""Module and class, or the class itself, by architecture."""

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


GROUP = "ark.models"
"""Entry points by which packages add decoders: the architecture's name, and module and class."""


def register(architecture: str, made: type[Any], model_type: str = "") -> None:
    """Adds a decoder for the architecture that config.json names so; in this process.

    made: a subclass of ark.models.llama.Llama. model_type: that of configs without architectures. A
    package adds its decoders to every process by entry points of the group `ark.models`.
    InvalidUsageError for a class that is no decoder and for a name that another class has.
    """
    known = ARCHITECTURES.get(architecture, made)
    if known != made:
        raise InvalidUsageError(
            f"{architecture} is computed by {known} already; register the class under the name of "
            "its own architecture"
        )
    ARCHITECTURES[architecture] = _checked(architecture, made)
    if model_type:
        MODEL_TYPES[model_type] = architecture


def architectures() -> tuple[str, ...]:
    """All architectures: ark's own, registered ones, and those of packages."""
    return tuple(dict.fromkeys([*ARCHITECTURES, *_packages()]))


def decoder(architecture: str) -> type[Any]:
    """The class of one of `architectures()`, a subclass of ark.models.llama.Llama. Where ark and a
    package have one of a name, ark's counts.
    """
    known = ARCHITECTURES.get(architecture)
    if known is None:
        point = _packages()[architecture]
        try:
            return _checked(architecture, point.load())
        except (ImportError, AttributeError) as error:
            raise SystemError(
                f"the decoder of {architecture} is installed, but {point.value} cannot be used: "
                f"{error}; install its package again"
            ) from error
    if isinstance(known, type):
        return known
    module, _, name = known.partition(":")
    found: type[Any] = getattr(importlib.import_module(module), name)
    return found


@cache
def _packages() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _checked(architecture: str, made: Any) -> type[Any]:
    """The class; InvalidUsageError unless it is a decoder."""
    base = decoder("LlamaForCausalLM")
    if not (isinstance(made, type) and issubclass(made, base)):
        raise InvalidUsageError(
            f"the decoder of {architecture} is {made!r}, but it must be a subclass of "
            "ark.models.llama.Llama, which has the entry points"
        )
    return made
