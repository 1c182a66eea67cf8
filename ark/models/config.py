"""The shape of a decoder, read from the config.json of a Hugging Face directory.

All other code uses `LlamaConfig` and never the JSON. `builtin_config` has shapes for planning and
benchmarks without a checkpoint. Unsupported configs are refused here with the name of the field.
Fields that only one decoder has are read in that decoder's file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from ark.ir.dtype import FLOAT_CODES, DataType, cache_type, int8
from ark.models.fields import Fields, check_directory
from ark.models.formats import read_format
from ark.models.formats.base import Format
from ark.models.formats.layout import Layout
from ark.models.registry import MODEL_TYPES, architectures, decoder
from ark.models.rope import Rope, inverse_frequencies, read_rope

SLIDING, FULL = "sliding_attention", "full_attention"
KV_CACHE_DTYPES = {"auto": "", "fp8": FLOAT_CODES.name, "int8": int8.name}
"""The values of the option --kv-cache-dtype. For each, the type to which keys and values are
quantised; empty if they are stored as floats of the weights' type.
"""
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of one model, in Hugging Face's names.

    `architecture` names the decoder (ark.models.registry). `dtype` is the weights' type if the
    config names one: "float32", "float16" or "bfloat16". Each of `eos_token_ids` ends a text; the
    list may be empty. windows: for each layer, the number of latest positions that a token attends
    to, its own included; 0 for all positions up to its own. An empty list means that no layer has a
    window. format: the format of the checkpoint's quantised weights. layouts: how ark holds
    quantised weights, by ark's names of the parameters; set by ark.models.checkpoint. cache_codes:
    the type of the codes of keys and values; empty for floats of the weights' type.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    tie_word_embeddings: bool = False
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    architecture: str = "LlamaForCausalLM"
    windows: tuple[int, ...] = ()
    format: Format | None = None
    layouts: tuple[tuple[str, Layout], ...] = ()
    cache_codes: str = ""

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"The config has {self.num_attention_heads} attention heads and "
                f"{self.num_key_value_heads} key/value heads, but each key/value head must serve a "
                "whole number of attention heads. Correct num_key_value_heads."
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelError(
                f"The config gives heads of {self.head_dim} elements, but rotary embeddings rotate "
                "elements in pairs, so the number must be even and positive. Correct head_dim "
                "(where it is absent, it is hidden_size / num_attention_heads)."
            )
        rotated = self.rope.rotated(self.head_dim)
        if rotated < 2 or rotated % 2:
            raise ModelError(
                f"The config rotates {rotated} of {self.head_dim} elements of a head "
                "(partial_rotary_factor), but the number must be even and positive. Correct it."
            )
        for factors in (self.rope.short, self.rope.long):
            if self.rope.kind == "longrope" and len(factors) != rotated // 2:
                raise ModelError(
                    f"The config has {len(factors)} factors of rotary frequencies for "
                    f"{rotated // 2} pairs of a head. Correct short_factor and long_factor."
                )
        if len(self.windows) not in (0, self.num_hidden_layers):
            raise ModelError(
                f"The config has {self.num_hidden_layers} layers, but attention windows for "
                f"{len(self.windows)}. Correct num_hidden_layers or layer_types."
            )
        for token in (self.bos_token_id, *self.eos_token_ids):
            if token is not None and token >= self.vocab_size:
                raise ModelError(
                    f"The config names {token} as a begin or end token, but the vocabulary has "
                    f"{self.vocab_size} tokens, 0 to {self.vocab_size - 1}. Correct bos_token_id, "
                    "eos_token_id or vocab_size."
                )

    @property
    def query_size(self) -> int:
        """Rows of the query projection: attention heads x head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection and of the value projection: key/value heads x head_dim."""
        return self.num_key_value_heads * self.head_dim

    @property
    def split_heads(self) -> int:
        """The number of heads that can be divided among ranks."""
        return self.num_key_value_heads

    @property
    def cache_rows(self) -> tuple[int, int]:
        """The shape of one position in a layer's cache: the number of rows, and the elements of a
        row.
        """
        return 2 * self.num_key_value_heads, self.head_dim

    def cache_type(self, dtype: DataType) -> DataType:
        """The type of the caches if the weights have type `dtype`."""
        width = self.cache_rows[1]
        return cache_type(self.cache_codes, width, dtype) if self.cache_codes else dtype

    @property
    def inner_size(self) -> int:
        """Rows of each gate and up projection."""
        return self.intermediate_size

    def window(self, layer: int) -> int:
        """The number of latest positions that a token in this layer attends to; 0 for all
        positions.
        """
        return self.windows[layer] if self.windows else 0

    @classmethod
    def from_directory(cls, directory: str | Path) -> LlamaConfig:
        """Reads config.json, and the stop tokens of generation_config.json if it names some.

        Raises ModelError if a file is missing, damaged or contradictory, and UnsupportedError for a
        model that ark does not support.
        """
        path = Path(directory)
        check_directory(path)
        config = config_from_fields(Fields.read(path / "config.json"))
        generation = path / "generation_config.json"
        if not generation.exists():
            return config
        fields = Fields.read(generation)
        if "eos_token_id" not in fields.values:
            return config
        return replace(config, eos_token_ids=fields.token_ids("eos_token_id"))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LlamaConfig:
        """Reads a config from the parsed content of a config.json."""
        return config_from_fields(Fields("config.json", values))


ConfigT = TypeVar("ConfigT", bound=LlamaConfig)


def with_cache(config: ConfigT, kv_cache_dtype: str, dtype: DataType) -> ConfigT:
    """The config with the KV cache type that the option kv_cache_dtype selects (a key of
    KV_CACHE_DTYPES). dtype: the type of the weights.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise InvalidUsageError(
            f"kv_cache_dtype is {kv_cache_dtype!r:.40}; give one of {', '.join(KV_CACHE_DTYPES)}"
        )
    config = replace(config, cache_codes=KV_CACHE_DTYPES[kv_cache_dtype])
    config.cache_type(dtype)  # raises an error if the rows cannot be codes
    return config


def config_from_fields(fields: Fields) -> LlamaConfig:
    """Reads a config with the decoder class of its architecture. Absent fields get the class's
    DEFAULTS.
    """
    kind = decoder(read_architecture(fields))
    config: LlamaConfig = kind.read_config(fields.with_defaults(kind.DEFAULTS))
    return config


def read_common(
    fields: Fields, *, activation: str = "silu", biased: bool = False, partial: bool = False
) -> LlamaConfig:
    """Reads the fields that all decoders have. The architecture's defaults must be filled in.
    Checks each field that changes a model's results.

    The decoder passes the other arguments. activation: the only activation that it supports, by
    transformers' name. biased: True if it handles `attention_bias`, which is otherwise refused.
    partial: True if it supports rotation of a part of each head.
    """
    for name in ("mlp_bias",) if biased else ("attention_bias", "mlp_bias"):
        if fields.flag(name, False):
            raise UnsupportedError(
                f"{fields.source}: {name} is true, but ark supports models without projection "
                "biases only. Use a checkpoint without biases."
            )
    name = "hidden_act" if activation == "silu" else "hidden_activation"
    if (given := fields.text(name)) != activation:
        raise UnsupportedError(
            f"{fields.source}: {name} is {given!r}, but ark computes this architecture with "
            f"{activation!r}. Use a checkpoint with that activation."
        )
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    context = fields.size("max_position_embeddings")
    rope = read_rope(fields, context)
    if rope.partial != 1 and not partial:
        raise UnsupportedError(
            f"{fields.source}: partial_rotary_factor is {rope.partial:g}, but ark supports "
            "rotation of whole heads only for this architecture. Use a checkpoint whose rotary "
            "embedding covers them."
        )
    bos = fields.token_ids("bos_token_id")
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_hidden_layers=fields.size("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=fields.size("num_key_value_heads", heads),
        head_dim=fields.size("head_dim", hidden // heads),
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=context,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        dtype=read_dtype(fields),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=fields.token_ids("eos_token_id"),
        architecture=read_architecture(fields),
        format=read_format(fields),
    )


def one_window(config: ConfigT, fields: Fields) -> ConfigT:
    """The config with `sliding_window` as the window of every layer. If the field is null, all
    layers attend to all positions.
    """
    if fields.get("sliding_window") is None:
        return config
    window = fields.size("sliding_window")
    return replace(config, windows=(window,) * config.num_hidden_layers)


def sliding_layers(config: ConfigT, fields: Fields, window: int, usual: Sequence[bool]) -> ConfigT:
    """The config with attention windows of size `window` for some layers. These are the layers that
    the field `layer_types` marks as sliding or, if it is absent or null, those for which `usual` is
    True. window: 0 for no window.
    """
    slide = list(usual)
    if (kinds := fields.get("layer_types")) is not None:
        if not isinstance(kinds, list) or not all(k in (SLIDING, FULL) for k in kinds):
            raise fields.wrong("layer_types", f"a list of {SLIDING!r} and {FULL!r}")
        slide = [kind == SLIDING for kind in kinds]
        if any(slide) and not window:
            raise ModelError(
                f"{fields.source}: layer_types has layers of {SLIDING!r}, but use_sliding_window "
                "and sliding_window give no window. Correct these fields."
            )
    return replace(config, windows=tuple(window * slides for slides in slide))


def asked_window(fields: Fields) -> int:
    """The field `sliding_window` if `use_sliding_window` is true; otherwise 0."""
    slides = fields.flag("use_sliding_window") and fields.get("sliding_window") is not None
    return fields.size("sliding_window") if slides else 0


def read_architecture(fields: Fields) -> str:
    """The name of the architecture. Raises UnsupportedError if ark does not support it."""
    names = fields.get("architectures")
    kind = fields.get("model_type")
    if not names and isinstance(kind, str) and kind in MODEL_TYPES:
        return MODEL_TYPES[kind]
    listed = names if isinstance(names, list) else [names or kind]
    if len(listed) != 1 or not isinstance(listed[0], str) or listed[0] not in architectures():
        shown = ", ".join(str(name) for name in listed)
        raise UnsupportedError(
            f"{fields.source} describes the architecture {shown[:200]}, but ark runs "
            f"{', '.join(architectures())}. Use a checkpoint of one of these."
        )
    return listed[0]


def read_dtype(fields: Fields) -> str | None:
    """The type of the weights, from the field `dtype` or, in older files, `torch_dtype`."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    dtype = fields.text(name)
    if dtype is None:
        return None
    dtype = dtype.removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedError(
            f"{fields.source}: {name} is {dtype!r}, but ark reads weights in {', '.join(DTYPES)}. "
            "Convert the checkpoint to one of these."
        )
    return dtype


def rope_inverse_frequencies(config: LlamaConfig) -> npt.NDArray[np.float32]:
    """The rotation per position, in radians, for each pair of elements of a head: float32,
    [head_dim / 2].
    """
    return inverse_frequencies(config.rope, config.head_dim)


LLAMA_3_2_1B = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=128256,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope=Rope(500000.0, "llama3", 32.0, 1.0, 4.0, 8192),
    tie_word_embeddings=True,
    dtype="bfloat16",
    bos_token_id=128000,
    eos_token_ids=(128001,),
)

LLAMA_3_1_8B = replace(
    LLAMA_3_2_1B,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    head_dim=128,
    rope=Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192),
    tie_word_embeddings=False,
)

LLAMA_3_1_70B = replace(
    LLAMA_3_1_8B,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
)

BUILTIN_CONFIGS = {
    "llama-3.2-1b": LLAMA_3_2_1B,
    "llama-3.1-8b": LLAMA_3_1_8B,
    "llama-3.1-70b": LLAMA_3_1_70B,
}


def builtin_config(name: str) -> LlamaConfig:
    """The shape of a published model, by name, for planning and benchmarks without a checkpoint."""
    if name not in BUILTIN_CONFIGS:
        raise InvalidUsageError(
            f"The built-in shape {name!r} does not exist; there are "
            f"{', '.join(BUILTIN_CONFIGS)}. Use one of these, or a checkpoint directory."
        )
    return BUILTIN_CONFIGS[name]
