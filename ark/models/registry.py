"""Maps the names of architectures in config.json to decoder classes.

Classes are imported by name when they are needed, so that reading a config imports only one
decoder.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from ark.errors import InvalidUsageError, SystemError

if TYPE_CHECKING:
    from ark.runtime.api.module import Module

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
    "GptOssForCausalLM": "ark.models.gpt_oss:GptOss",
    "DeepseekV2ForCausalLM": "ark.models.deepseek:DeepseekV2",
    "DeepseekV3ForCausalLM": "ark.models.deepseek:DeepseekV3",
}
"""For each architecture, the decoder's module and class name, or the class itself."""

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
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
"""The architecture for each model_type of config.json. It is used if the config has no field
`architectures`.
"""


GROUP = "ark.models"
"""The group of entry points by which packages add decoders. An entry point's name is the
architecture, and its value is a module and a class.
"""


def register(architecture: str, decoder_class: type[Module], model_type: str = "") -> None:
    """Adds a decoder for an architecture name of config.json, in this process.

    decoder_class: a subclass of ark.models.llama.Llama. model_type: the field `model_type` of
    config.json, which selects the decoder if the config has no field `architectures`. To add
    decoders in every process, a package declares entry points of the group `ark.models`. Raises
    InvalidUsageError for a class that is not a decoder and for a name that is already registered
    for another class.

    Examples:
        >>> from ark.models.llama import Llama
        >>> class OwnDecoder(Llama):
        ...     pass
        >>> ark.models.register("OwnDecoderForCausalLM", OwnDecoder)
    """
    known = ARCHITECTURES.get(architecture, decoder_class)
    if known != decoder_class:
        raise InvalidUsageError(
            f"{architecture} is already registered for {known}; register the class under its "
            "own architecture's name"
        )
    ARCHITECTURES[architecture] = _checked(architecture, decoder_class)
    if model_type:
        MODEL_TYPES[model_type] = architecture


def architectures() -> tuple[str, ...]:
    """All architectures: those of ark, those that were registered, and those of packages."""
    return tuple(dict.fromkeys([*ARCHITECTURES, *_packages()]))


def decoder(architecture: str) -> type[Any]:
    """The class for one of `architectures()`, a subclass of ark.models.llama.Llama. If ark and a
    package have the same architecture, ark's class is used.
    """
    known = ARCHITECTURES.get(architecture)
    if known is None:
        point = _packages()[architecture]
        try:
            return _checked(architecture, point.load())
        except (ImportError, AttributeError) as error:
            raise SystemError(
                f"the decoder of {architecture} is installed, but {point.value} cannot be "
                f"imported: {error}; install its package again"
            ) from error
    if isinstance(known, type):
        return known
    module, _, name = known.partition(":")
    loaded: type[Any] = getattr(importlib.import_module(module), name)
    return loaded


@cache
def _packages() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _checked(architecture: str, decoder_class: Any) -> type[Any]:
    """Returns the class. Raises InvalidUsageError if it is not a decoder."""
    base = decoder("LlamaForCausalLM")
    if not (isinstance(decoder_class, type) and issubclass(decoder_class, base)):
        raise InvalidUsageError(
            f"the decoder of {architecture} is {decoder_class!r}, but it must be a subclass of "
            "ark.models.llama.Llama, which has the entry points"
        )
    return decoder_class
