"""Quantised checkpoints of small random decoders, and a check of their logits: transformers
computes the expected ones, with weights dequantised by the format's own library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ark.backend import registry
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from tests.cases.decoders import CASES
from tests.cells import compared
from tests.checkpoints import make_checkpoint, reference

PROMPT = [int(t) for t in np.random.default_rng(5).integers(0, 258, 21)]
# Widths 96 and 160 are multiples of 32, the group size, but not of 128.
ODD: dict[str, Any] = {"hidden": 96, "head_dim": 24, "intermediate": 160, "layers": 2}
GPT_OSS: dict[str, Any] = {**CASES["gpt-oss"], **ODD}
Tensors = dict[str, torch.Tensor]
Quantise = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""A function of a weight. Returns its quantised tensors by name suffix, and its dequantised
values.
"""


def quantised_checkpoint(
    folder: Path, quantise: Quantise, config: Mapping[str, Any], *, skip: str = "", **fields: Any
) -> tuple[Path, Path, Tensors]:
    """Returns a plain checkpoint, the same checkpoint with all linear layers except the head
    quantised, and the dequantised weights by name. config: quantization_config. skip: weights whose
    names contain it are not quantised.
    """
    plain = make_checkpoint(folder / "plain", **{**ODD, **fields})
    there = make_checkpoint(folder / "quantised", **{**ODD, **fields})
    return plain, there, quantise_files(there, quantise, config, skip)


def quantise_files(
    there: Path, quantise: Quantise, config: Mapping[str, Any], skip: str = ""
) -> Tensors:
    """Replaces all linear layers of the checkpoint in a directory, except the head, by quantised
    ones, as `quantised_checkpoint` does.
    """
    stored, values = load_file(there / "model.safetensors"), {}
    for name in [n for n in stored if n.endswith("_proj.weight") and (not skip or skip not in n)]:
        pieces, values[name] = quantise(stored.pop(name).float())
        stem = name.removesuffix("weight")
        stored |= {stem + end: piece.contiguous() for end, piece in pieces.items()}
    save_file(stored, there / "model.safetensors", {"format": "pt"})
    path = there / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return values


def mxfp4_checkpoint(folder: Path, seed: int = 0) -> tuple[Path, Path, Tensors]:
    """Returns a gpt-oss checkpoint, the same with MXFP4 experts, and the experts' values by
    name.
    """
    plain = make_checkpoint(folder / "plain", **GPT_OSS)
    there = make_checkpoint(folder / "quantised", **GPT_OSS)
    stored, values = load_file(plain / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(seed)
    for name in [n for n in stored if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape[:-1], generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(stored, there / "model.safetensors", {"format": "pt"})
    path = there / "config.json"
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return plain, there, values


def check_logits(
    backend: str,
    checkpoint: Checkpoint,
    plain: Path,
    values: Mapping[str, torch.Tensor],
    room: float = 1e-4,
    chunk: int = 16,
) -> list[int]:
    """Returns the tokens after a prompt. Asserts that the last logits are within `room` of those
    that transformers computes with `values` as the weights of these names.
    """
    chosen, _ = registry.choose(backend)
    with (
        closing(chosen.open(0)) as device,
        Generator(checkpoint, chosen, device, chunk=chunk) as generator,
    ):
        tokens = list(generator.stream(PROMPT, 4, stop_tokens=()))
        ours = generator.executor.read("decode.head.logits").ravel()
    model = reference(plain)
    with torch.inference_mode():
        parameters = dict(model.named_parameters())
        for name, value in values.items():
            parameters[name].copy_(value)
        logits = model(torch.tensor([PROMPT + tokens[:-1]])).logits[0, -1].numpy()
    np.testing.assert_allclose(ours, logits, rtol=room, atol=room)
    compared(checkpoint, backend)
    return tokens


def check_values(checkpoint: Checkpoint, values: Mapping[str, torch.Tensor]) -> None:
    """Compares every weight of a checkpoint, dequantised, with the given values, because tests of
    logits do not use all codes.
    """
    names = {weight.stored_name: name for name, weight in checkpoint.weights.items()}
    layouts = dict(checkpoint.config.layouts)
    for stored, value in values.items():
        name = names[stored]
        coded = name in layouts
        ours = checkpoint.codes(name).floats() if coded else checkpoint.read(name)
        room = 1e-6 if coded else float(ml_dtypes.finfo(checkpoint.dtype).eps)
        most = float(value.abs().max())
        np.testing.assert_allclose(ours.astype(np.float32), value, rtol=room, atol=1e-7 * most)
