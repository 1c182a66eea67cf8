"""GGUF files: logits equal those of transformers with weights that the gguf package dequantises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("gguf")

from ark.models.checkpoint import Checkpoint
from ark.models.formats.gguf import BLOCKS
from tests.cases.gguf_files import gguf_checkpoint
from tests.cases.quantized import check_logits, check_values
from tests.slow import slow

pytestmark = pytest.mark.emulated("slow")
KINDS = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "MXFP4",
)
DEFAULT = ("F16", "Q4_0", "Q4_K", "Q6_K", "MXFP4")


@pytest.mark.parametrize(
    "kind", [k if k in DEFAULT else pytest.param(k, marks=slow) for k in (*KINDS, "Q2_K")]
)
def test_types_of_blocks(backend: str, kind: str, tmp_path: Path) -> None:
    """GGUF files of each block type. Types that ark cannot multiply, such as Q2_K, are dequantised
    when they are loaded. Weights that stay floats are fp32 here, for more precision.
    """
    plain, path, values = gguf_checkpoint(tmp_path, kind)
    checkpoint = Checkpoint.open(path)
    held = dict(checkpoint.config.layouts)
    assert ("head.weight" in held) == (kind in BLOCKS)
    check_values(checkpoint, values)
    checkpoint.config = replace(checkpoint.config, dtype="float32")
    check_logits(backend, checkpoint, plain, values, room=2e-4)


@pytest.mark.parametrize("kind", ["qwen2", pytest.param("qwen3", marks=slow)])
def test_architectures(backend: str, kind: str, tmp_path: Path) -> None:
    """GGUF files of each architecture: with biases, norms of heads, and an embedding that is also
    the output head.
    """
    fields = {"attention_bias": False} if kind == "qwen3" else {}
    plain, path, values = gguf_checkpoint(tmp_path, "Q8_0", model=kind, tie=True, **fields)
    checkpoint = Checkpoint.open(path)
    assert "head.weight" in dict(checkpoint.config.layouts)
    check_logits(backend, checkpoint, plain, values, room=2e-3)
