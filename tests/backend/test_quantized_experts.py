"""Mixtures of experts with quantised weights: logits equal those of transformers with weights
dequantised by the format's own library or by torch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ark.models.checkpoint import Checkpoint
from tests.cases.decoders import EXPERTS, LATENT
from tests.cases.quantized import ODD, Tensors, check_logits, mxfp4_checkpoint, quantised_checkpoint

pytestmark = pytest.mark.emulated("gfx942")
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}


def test_mxfp4_experts_of_gpt_oss(backend: str, tmp_path: Path) -> None:
    plain, there, values = mxfp4_checkpoint(tmp_path)
    checkpoint = Checkpoint.open(there)
    kinds = {name: layout.codes.name for name, layout in checkpoint.config.layouts}
    assert len(kinds) == 3 * 2 and set(kinds.values()) == {"fp4"}
    # Scales are stored in 8 bits and take 16 bits in memory.
    assert checkpoint.nbytes < sum(f.stat().st_size for f in plain.glob("*.safetensors")) / 2
    check_logits(backend, checkpoint, plain, values)


def blocks_of_32(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Returns the codes and scales of a weight in blocks of 32, and its dequantised values."""
    blocks = weight.unfold(0, 32, 32).unfold(1, 32, 32)
    scales = blocks.abs().amax((-1, -2)) / 448
    wide = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * wide


def test_fp8_blocks_of_each_expert(backend: str, tmp_path: Path) -> None:
    """Experts in Qwen3-FP8's format: fp8 with a scale for each block. The router is not
    quantised.
    """
    shape = {"num_experts": 4, "moe_intermediate_size": 64, "head_dim": 32, **EXPERTS}
    plain, there, values = quantised_checkpoint(
        tmp_path, blocks_of_32, BLOCKS, kind="qwen3_moe", norm_topk_prob=True, **shape
    )
    checkpoint = Checkpoint.open(there)
    assert len(checkpoint.config.layouts) == (4 + 3) * 2
    check_logits(backend, checkpoint, plain, _stacked(values))


@pytest.mark.emulated("slow")
def test_fp8_blocks_of_deepseek(backend: str, tmp_path: Path) -> None:
    """DeepSeek's fp8 format. The key and value projections of heads are one quantised matrix, which
    is dequantised.
    """
    heads = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    shape = {**LATENT, **heads, "qk_nope_head_dim": 32, "moe_intermediate_size": 64}
    plain, there, values = quantised_checkpoint(
        tmp_path, blocks_of_32, BLOCKS, kind="deepseek_v3", **{**ODD, **shape, "layers": 2}
    )
    checkpoint = Checkpoint.open(there)
    own = [name for name, _ in checkpoint.config.layouts]
    assert len(own) == 2 * 3 + 3 + 3 + 3  # attention, the dense layer, experts, shared experts
    check_logits(backend, checkpoint, plain, _stacked(values))


def _stacked(values: Tensors) -> Tensors:
    """Returns the experts' weights by the names of transformers' parameters."""
    own = {name: value for name, value in values.items() if ".experts." not in name}
    for layer in range(ODD["layers"]):
        stem = f"model.layers.{layer}.mlp.experts."
        if not any(name.startswith(stem) for name in values):
            continue
        by = {
            part: torch.stack([v for n, v in values.items() if n.startswith(stem) and part in n])
            for part in ("gate", "up", "down")
        }
        own[stem + "gate_up_proj"] = torch.cat([by["gate"], by["up"]], 1)
        own[stem + "down_proj"] = by["down"]
    return own
