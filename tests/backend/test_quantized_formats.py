"""Checkpoints in the formats of other packages: logits equal those with weights that the package
itself dequantises.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ark.models.checkpoint import Checkpoint
from tests.cases.quantized import (
    Tensors,
    check_logits,
    check_values,
    quantised_checkpoint,
)
from tests.cases.quantized_schemes import COMPRESSED, compressed, scales_of
from tests.cases.quantized_words import awq, gptq
from tests.slow import slow

DEFAULT = ("fp8-block", "int4-group-asymmetric", "nvfp4", "mxfp4")


@pytest.mark.parametrize(
    "name",
    [n if n in DEFAULT else pytest.param(n, marks=slow) for n in COMPRESSED],
)
@pytest.mark.emulated("slow")
def test_compressed_tensors(backend: str, name: str, tmp_path: Path) -> None:
    quantise, config = compressed(name)
    plain, there, values = quantised_checkpoint(tmp_path, quantise, config)
    checkpoint = Checkpoint.open(there)
    assert len(checkpoint.config.layouts) == len(values) == 14
    check_logits(backend, checkpoint, plain, values)


def test_codes_of_compressed_tensors_are_the_packages(tmp_path: Path) -> None:
    """The codes that ark reads for every scheme of compressed-tensors equal the package's, in
    widths that are not multiples of 128.
    """
    pytest.importorskip("compressed_tensors")
    for name in COMPRESSED:
        quantise, config = compressed(name)
        _, there, values = quantised_checkpoint(tmp_path / name, quantise, config)
        check_values(Checkpoint.open(there), values)


@pytest.mark.emulated("slow")
@pytest.mark.parametrize("block", [True, pytest.param(False, marks=slow)])
def test_fp8_of_transformers(backend: str, block: bool, tmp_path: Path) -> None:
    """transformers' fp8 format: with one scale for the tensor, or with a scale for each block of
    128x128 elements (the blocks at the ends of rows and columns are smaller).
    """
    fields = {"num_bits": 8, "type": "float", "strategy": "block" if block else "tensor"}

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale, _ = scales_of(weight, fields)
        wide = scale
        if block:
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            wide = wide[: weight.shape[0], : weight.shape[1]]
        codes = (weight / wide).to(torch.float8_e4m3fn)
        end = "weight_scale_inv" if block else "weight_scale"
        return {"weight": codes, end: scale}, codes.float() * wide

    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config |= {"weight_block_size": [128, 128]} if block else {}
    sizes = {"intermediate": 200, "hidden": 136}
    plain, there, values = quantised_checkpoint(tmp_path, quantise, config, **sizes)
    checkpoint = Checkpoint.open(there)
    check_values(checkpoint, values)
    check_logits(backend, checkpoint, plain, values)


@pytest.mark.emulated("slow")
def test_awq(backend: str, tmp_path: Path) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    plain, there, values = quantised_checkpoint(tmp_path, awq, {**config, "version": "gemm"})
    checkpoint = Checkpoint.open(there)
    check_values(checkpoint, values)
    check_logits(backend, checkpoint, plain, values)


@pytest.mark.emulated("slow")
@pytest.mark.parametrize(
    ("bits", "symmetric", "ordered"),
    [
        (4, True, False),
        (4, False, True),
        pytest.param(4, False, False, marks=slow),
        pytest.param(4, True, True, marks=slow),
        pytest.param(8, False, True, marks=slow),
        pytest.param(2, True, False, marks=slow),
    ],
)
def test_gptq(backend: str, bits: int, symmetric: bool, ordered: bool, tmp_path: Path) -> None:
    """GPTQ checkpoints of several bit widths. ordered: True for act-order, in which the inputs of a
    group are spread over a row.
    """
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": symmetric}
    quantise = gptq(bits, symmetric, ordered)
    plain, there, values = quantised_checkpoint(tmp_path, quantise, {**config, "desc_act": ordered})
    checkpoint = Checkpoint.open(there)
    check_values(checkpoint, values)
    check_logits(backend, checkpoint, plain, values)


@pytest.mark.emulated("slow")
@pytest.mark.parametrize("nested", [True, pytest.param(False, marks=slow)])
def test_bitsandbytes_nf4(
    backend: str, nested: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """bitsandbytes' NF4 weights are dequantised when they are loaded, with a warning."""
    functional = pytest.importorskip("bitsandbytes.functional")

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        kind = {"quant_type": "nf4", "compress_statistics": nested}
        codes, state = functional.quantize_4bit(weight, **kind)
        # On the CPU the package dequantises a matrix only if its rows have whole blocks; so the
        # matrix is reshaped, which changes nothing because blocks follow each other across row
        # ends.
        values = functional.dequantize_4bit(*functional.quantize_4bit(weight.view(-1, 64), **kind))
        pieces = {f"weight.{end}": t for end, t in state.as_dict(packed=True).items()}
        return {"weight": codes, **pieces}, values.view(weight.shape)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    plain, there, values = quantised_checkpoint(tmp_path, quantise, config)
    checkpoint = Checkpoint.open(there)
    assert "dequantises" in capfd.readouterr().err and not checkpoint.config.layouts
    check_values(checkpoint, values)
    check_logits(backend, checkpoint, plain, values)


def test_bitsandbytes_int8(tmp_path: Path) -> None:
    """bitsandbytes' LLM.int8 weights, in which the largest magnitude of a row has the code 127."""

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        most = weight.abs().amax(1)
        codes = (weight * 127 / most[:, None]).round().to(torch.int8)
        return {"weight": codes, "SCB": most}, codes * (most / 127)[:, None]

    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    _, there, values = quantised_checkpoint(tmp_path, quantise, config)
    checkpoint = Checkpoint.open(there)
    assert len(checkpoint.config.layouts) == 14
    check_values(checkpoint, values)
