"""Decoders with quantised weights: logits equal those with weights dequantised by torch or by the
format's own library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ark.models.checkpoint import Checkpoint
from tests.cases.quantized import ODD, check_logits
from tests.checkpoints import make_checkpoint, reference
from tests.emulated import few_emulated
from tests.slow import slow

ON_LOAD: dict[str, tuple[int, float, Any, Any]] = {
    # By the format's name: (elements of a group, 0 for a whole row; largest code; type of codes,
    # None for integers; type of scales).
    "fp8": (0, 448.0, torch.float8_e4m3fn, torch.float32),
    "int8": (0, 127.0, None, torch.float32),
    "int4": (32, 7.0, None, torch.bfloat16),
}


def rounded(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Returns a weight after quantisation by `--quantize` NAME and dequantisation."""
    group, most, codes, scales = ON_LOAD[name]
    wide = weight.float().reshape(len(weight), -1, group or weight.shape[1])
    scale = (wide.abs().amax(-1, keepdim=True) / most).to(scales).float()
    scaled = (wide / scale).clamp(-most, most)
    near = scaled.round() if codes is None else scaled.to(codes).float()
    return (near * scale).reshape(weight.shape)


@pytest.mark.parametrize("name", few_emulated(ON_LOAD, "int4"))
def test_weights_quantised_on_load(backend: str, name: str, tmp_path: Path) -> None:
    """Weights that are quantised when they are loaded give transformers' logits: in a prompt of 16
    rows (dequantised first) and in decoding (from the codes).
    """
    plain = make_checkpoint(tmp_path, **ODD)
    values = {
        weight: rounded(value, name)
        for weight, value in reference(plain).state_dict().items()
        if weight.endswith("_proj.weight")
    }
    checkpoint = Checkpoint.open(plain, name)
    assert len(checkpoint.config.layouts) == len(values) == 14
    check_logits(backend, checkpoint, plain, values)


@pytest.mark.emulated("slow")
@pytest.mark.parametrize("name", ["int8", *(pytest.param(n, marks=slow) for n in ("fp8", "int4"))])
@pytest.mark.parametrize(
    "case",
    [
        {"kind": "qwen2"},
        pytest.param({"kind": "gemma2", "tie": True}, marks=slow),
        pytest.param({"kind": "qwen3", "attention_bias": False}, marks=slow),
        pytest.param({"kind": "olmo2"}, marks=slow),
        {"kind": "phi3", "head_dim": None},
        {"kind": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "kv_heads": 2},
    ],
    ids=lambda case: case["kind"],
)
def test_decoders_quantised_on_load(
    backend: str, case: dict[str, Any], name: str, tmp_path: Path
) -> None:
    """Decoders whose weights are quantised when they are loaded: with biases, with fused weights
    (whose parts are quantised row by row), and with experts.
    """
    plain = make_checkpoint(tmp_path, **{**ODD, **case}, dtype="bfloat16")
    weights = {
        weight: rounded(value.reshape(-1, value.shape[-1]), name).reshape(value.shape)
        for weight, value in reference(plain).state_dict().items()
        if weight.endswith(("_proj.weight", "experts.gate_up_proj", "experts.down_proj"))
    }
    checkpoint = Checkpoint.open(plain, name)
    experts = sum(".mlp." in held for held in dict(checkpoint.config.layouts))
    assert experts == 3 * 2
    check_logits(backend, checkpoint, plain, weights, room=0.05)
