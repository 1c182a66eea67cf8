"""Decoders beside Llama, each on a tiny random checkpoint: tokens and logits are transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ark.backend import registry
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.emulated("slow")

EXPERTS = {"num_experts_per_tok": 2, "kv_heads": 2}

CASES: dict[str, dict[str, Any]] = {
    "qwen3": {"kind": "qwen3", "attention_bias": False},
    "qwen3-tied-wide-heads": {"kind": "qwen3", "tie": True, "head_dim": 32, "shards": 2},
    "mixtral": {"kind": "mixtral", "num_local_experts": 5, **EXPERTS},
    "qwen3-moe": {
        "kind": "qwen3_moe",
        "num_experts": 6,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        **EXPERTS,
    },
    "qwen3-moe-plain-scores": {
        "kind": "qwen3_moe",
        "num_experts": 4,
        "moe_intermediate_size": 40,
        "norm_topk_prob": False,
        **EXPERTS,
    },
}
NEW = 20


@pytest.mark.parametrize("case", sorted(CASES))
def test_tokens_and_logits_are_those_of_transformers(
    backend: str, case: str, tmp_path: Path
) -> None:
    directory = make_checkpoint(tmp_path / case, **CASES[case])
    prompt = [int(t) for t in np.random.default_rng(5).integers(0, 320, 21)]
    chosen, _ = registry.choose(backend)
    device = chosen.open(0)
    try:
        with Generator(Checkpoint.open(directory), chosen, device, chunk=8) as generator:
            ours = list(generator.stream(prompt, NEW, stop_tokens=()))
            last = generator.executor.read("decode.head.logits").ravel()
    finally:
        device.close()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ours[:-1]])).logits[0].numpy()
    assert ours == logits[len(prompt) - 1 :].argmax(-1).tolist()
    assert len(set(ours)) > NEW // 3  # a model that repeats itself would prove little
    np.testing.assert_allclose(last, logits[-1], rtol=1e-4, atol=1e-4)
