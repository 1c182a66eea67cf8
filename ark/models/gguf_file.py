"""Reads a GGUF file as a checkpoint: the config from its metadata, and the tensors by the names
that they have in a Hugging Face directory. It uses the gguf package. Called by
ark.models.checkpoint, ark.models.tokenizer and ark.models.chat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ark.errors import ModelError, UnsupportedError
from ark.models.config import LlamaConfig, config_from_fields
from ark.models.fields import Fields
from ark.models.formats.gguf import Gguf
from ark.models.shards import DTYPES, ELEMENTS, StoredTensor, read_bytes
from ark.models.stored import Stored

SUFFIX = ".gguf"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
OF_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FIELDS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
NEEDED = tuple(FIELDS)[:5]
FACTORS = "rope_freqs.weight"
"""The name of the tensor whose elements divide the rotary frequencies (Llama 3)."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class GgufFile:
    """The content of a GGUF file. metadata: values by key. tensors: by their names in the file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def is_gguf(path: str | Path) -> bool:
    """True if the file has the name of a GGUF file."""
    return Path(path).suffix == SUFFIX and not Path(path).is_dir()


def read_gguf(path: str | Path) -> GgufFile:
    """Reads the metadata and the tensors of a file. Raises ModelError if it is missing or
    damaged.
    """
    there = Path(path)
    if not there.is_file():
        raise ModelError(f"{there} does not exist. Give a GGUF file, or a checkpoint's directory.")
    state = there.stat()
    return _read(there, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=2)
def _read(path: Path, _time: int, _size: int) -> GgufFile:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UnsupportedError(
            "the gguf package, which reads GGUF files, is not installed; install it with `pip "
            "install 'ark-gpu[gguf]'`"
        ) from error
    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {
            tensor.name: StoredTensor(
                tensor.name,
                path,
                tensor.tensor_type.name,
                tuple(int(n) for n in reversed(tensor.shape)),
                int(tensor.data_offset),
                int(tensor.n_bytes),
            )
            for tensor in reader.tensors
        }
    except (OSError, MemoryError):
        raise ModelError(f"{path} cannot be read. Make it readable, then try again.") from None
    except Exception as error:  # the gguf package raises NumPy's exceptions
        raise ModelError(
            f"{path} is not an intact GGUF file ({str(error)[:200]}). The download or copy was cut "
            "short, or the file is damaged: fetch it again."
        ) from None
    return GgufFile(path, metadata, tensors)


def read_config(file: GgufFile) -> LlamaConfig:
    """The shape of the model. Raises UnsupportedError for architectures that ark cannot read from
    GGUF files.
    """
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES or file.metadata.get(f"{name}.expert_count"):
        experts = " with experts" if name in ARCHITECTURES else ""
        raise UnsupportedError(
            f"{file.path} describes the architecture {name[:200]!r}{experts}, but ark reads "
            f"GGUF files of {', '.join(ARCHITECTURES)} without experts. Use the model's Hugging "
            "Face directory."
        )

    def given(key: str) -> Any:
        return file.metadata.get(f"{name}.{key}")

    absent = [key for key in NEEDED if given(key) is None]
    if absent:
        raise ModelError(
            f"{file.path} has no {name}.{absent[0]} in its metadata. Download the file again."
        )
    values: dict[str, Any] = {own: given(key) for key, own in FIELDS.items()}
    values = {own: value for own, value in values.items() if value is not None}
    embedding = file.tensors.get("token_embd.weight")
    quantised = embedding is not None and embedding.dtype_code not in DTYPES
    values |= {
        "architectures": [ARCHITECTURES[name]],
        "vocab_size": embedding.shape[0] if embedding else None,
        "tie_word_embeddings": "output.weight" not in file.tensors and not quantised,
        "dtype": "float16" if embedding is None or quantised else embedding.dtype.name,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _stops(file),
    }
    if (scaling := _scaling(file, given)) is not None:
        values["rope_scaling"] = scaling
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    rotated = given("rope.dimension_count")
    if type(heads) is type(hidden) is type(rotated) is int and heads > 0:
        width = values.get("head_dim", hidden // heads)
        if type(width) is int and width > 0:  # other sizes are refused below
            values["partial_rotary_factor"] = rotated / width
    config = config_from_fields(Fields(str(file.path), values))
    return dataclasses.replace(config, format=Gguf())


def _stops(file: GgufFile) -> list[int]:
    """The tokens that end a text: the end tokens of a text, of a turn, and of a message."""
    ids = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    given = [i for i in ids if i is not None]
    return [i for place, i in enumerate(given) if i not in given[:place]]


def _scaling(file: GgufFile, given: Any) -> dict[str, Any] | None:
    """The scaling of rotary frequencies in the metadata, in the form of `rope_scaling` in a
    config.json.
    """
    factors = file.tensors.get(FACTORS)
    if factors is not None:
        if factors.dtype_code != "F32":
            raise ModelError(
                f"{file.path} holds {FACTORS} as {factors.dtype_code}, but it should be F32. "
                "Download the file again."
            )
        divided = read_bytes(factors, 0, factors.nbytes).view(ELEMENTS["F32"]).tolist()
        factors_of_all = {"short_factor": divided, "long_factor": divided}
        return {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, **factors_of_all}
    kind = given("rope.scaling.type")
    if kind in (None, "none"):
        return None
    original = given("rope.scaling.original_context_length")
    scaling = {"rope_type": kind, "factor": given("rope.scaling.factor")}
    return scaling | ({} if original is None else {"original_max_position_embeddings": original})


def find_gguf_tensors(file: GgufFile) -> dict[str, StoredTensor]:
    """The tensors by the names that they have in a Hugging Face directory. A quantised embedding
    that is also the head is listed under both names.
    """
    stored = {}
    for name, tensor in file.tensors.items():
        if name != FACTORS:
            renamed = _renamed(name)
            stored[renamed] = dataclasses.replace(tensor, name=renamed)
    embedding = stored.get(EMBEDDING)
    if embedding is not None and HEAD not in stored and embedding.dtype_code not in DTYPES:
        stored[HEAD] = dataclasses.replace(embedding, name=HEAD)
    return stored


def _renamed(name: str) -> str:
    stem, _, end = name.rpartition(".")
    parts = stem.split(".")
    if stem in TENSORS:
        return f"{TENSORS[stem]}.{end}"
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in OF_LAYERS:
        return f"model.layers.{parts[1]}.{OF_LAYERS[parts[2]]}.{end}"
    return name


def reordered(file: GgufFile, config: LlamaConfig) -> dict[str, Stored]:
    """The row order of query and key weights, by ark's names of the parameters. Only files of the
    architecture llama need reordering, because there the two elements of a rotated pair are in
    neighbouring rows.
    """
    if file.metadata.get("general.architecture") != "llama":
        return {}
    stored = {}
    for name, size in (("query", config.query_size), ("key", config.kv_size)):
        rows = file.tensors.get(f"blk.0.attn_{name[0]}.weight")
        if rows is None or rows.shape[:1] != (size,) or config.head_dim % 2:
            continue  # the loader refuses tensors of other sizes
        order = np.arange(size).reshape(-1, config.head_dim // 2, 2).swapaxes(1, 2).ravel()
        for layer in range(config.num_hidden_layers):
            stored[f"layers.{layer}.attention.{name}"] = Stored(order.tolist(), size)
    return stored
