"""GGUF files of small random decoders, written by the gguf package. Weights are of any GGUF type;
types that the package cannot quantise to are filled with random blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from safetensors.torch import load_file

from ark.models.gguf_file import OF_LAYERS, TENSORS
from tests.checkpoints import make_checkpoint

# Rows of weights are whole GGUF blocks of 256 elements, except the rows of attention's output
# projection (96 elements).
SIZES: dict[str, Any] = {
    "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 24, "intermediate": 256, "layers": 2,
}  # fmt: skip
FP16_PLACES = {
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,),
}  # fmt: skip


def blocks(shape: tuple[int, int], kind: str, seed: int) -> np.ndarray:
    """Returns random blocks of a type. The scales of blocks are small; the scale of the first block
    is 0 if a block of this type begins with its scale.
    """
    inputs, nbytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (shape[0] * shape[1] // inputs, nbytes), dtype=np.uint8)
    for place in FP16_PLACES[kind]:
        steps = rng.uniform(0.5e-4, 3e-4, (len(data), 1)).astype(np.float16)
        steps[0] = 0 if place == 0 else steps[0]
        data[:, place : place + 2] = steps.view(np.uint8)
    return data.reshape(shape[0], -1)


def encoded(values: np.ndarray, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a tensor's bytes in a type, and its values as the package dequantises them."""
    quantised = GGMLQuantizationType[kind]
    if kind in FP16_PLACES:
        data = blocks(values.shape, kind, seed)  # type: ignore[arg-type]
    else:
        data = gguf.quants.quantize(values, quantised)
    return data, gguf.quants.dequantize(data, quantised).reshape(values.shape)


def permuted(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Returns the rows of queries or keys of a projection in the order that llama.cpp stores for
    its rotary embedding.
    """
    wide = weight.reshape(-1, 2, head_dim // 2, weight.shape[-1])
    return wide.swapaxes(1, 2).reshape(weight.shape)


def unpermuted(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """The inverse of `permuted`."""
    wide = weight.reshape(-1, head_dim // 2, 2, weight.shape[-1])
    return wide.swapaxes(1, 2).reshape(weight.shape)


def gguf_checkpoint(
    folder: Path,
    kind: str,
    *,
    metadata: Mapping[str, str] | None = None,
    more: Mapping[str, np.ndarray] | None = None,
    model: str = "llama",
    **fields: Any,
) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """Returns a checkpoint directory, a GGUF file of the same shape whose matrices are of type
    `kind`, and their values by name. metadata, more: further metadata strings and tensors.
    """
    plain = make_checkpoint(folder / "plain", **{**SIZES, **fields}, kind=model)
    config = json.loads((plain / "config.json").read_text())
    name = config["model_type"]
    path = folder / "model.gguf"
    writer = GGUFWriter(path, name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    for key, value in (metadata or {}).items():
        writer.add_string(key, value)
    add_tokenizer(writer, plain)
    values = add_tensors(writer, plain, kind, name, config["head_dim"])
    for tensor, array in (more or {}).items():
        writer.add_tensor(tensor, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return plain, path, values


def add_tensors(
    writer: GGUFWriter, plain: Path, kind: str, name: str, head_dim: int
) -> dict[str, torch.Tensor]:
    """Adds the weights of the checkpoint directory `plain` to a GGUF file, as blocks of type
    `kind`. A matrix whose rows are not whole blocks is stored as fp16. Returns the stored values by
    name.
    """
    names = {own: short for short, own in {**TENSORS, **OF_LAYERS}.items()}
    values = {}
    for seed, (stored, tensor) in enumerate(sorted(load_file(plain / "model.safetensors").items())):
        stem, _, end = stored.rpartition(".")
        _, _, number, inner = [*stem.split(".", 3), "", "", ""][:4]
        short = names[stem] if stem in names else f"blk.{number}.{names[inner]}"
        weight = tensor.float().numpy()
        if weight.ndim == 1:
            writer.add_tensor(f"{short}.{end}", weight)
            continue
        turned = name == "llama" and short.endswith(("attn_q", "attn_k"))
        weight = permuted(weight, head_dim) if turned else weight
        size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
        own = kind if weight.shape[1] % size == 0 else "F16"
        data, dequantised = encoded(weight, own, seed)
        dequantised = unpermuted(dequantised, head_dim) if turned else dequantised
        values[stored] = torch.from_numpy(np.ascontiguousarray(dequantised, np.float32))
        writer.add_tensor(f"{short}.{end}", data, raw_dtype=GGMLQuantizationType[own])
    return values


def add_tokenizer(writer: GGUFWriter, plain: Path, pre: str = "default") -> None:
    """Adds the byte-level tokenizer of a checkpoint directory."""
    tokenizer = json.loads((plain / "tokenizer.json").read_text())
    vocab, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    ids = {i: token for token, i in vocab.items()} | {t["id"]: t["content"] for t in added}
    special = {t["id"] for t in added}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([ids[i] for i in range(len(ids))])
    types = [TokenType.CONTROL if i in special else TokenType.NORMAL for i in range(len(ids))]
    writer.add_token_types(types)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
