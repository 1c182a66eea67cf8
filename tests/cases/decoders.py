"""Cases and helpers of tests/backend/test_decoders.py, which other tests use too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ark.backend import registry
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from tests.cells import compared
from tests.checkpoints import make_checkpoint, reference

LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.3, 1.5, 2.0, 2.5, 3.0, 5.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 9.0, 12.0, 20.0],
    "factor": 8.0,
}
PART = {
    "partial_rotary_factor": 0.75,
    **{name: LONG[name][:6] for name in ("short_factor", "long_factor")},  # type: ignore[index]
}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GEMMA = {"query_pre_attn_scalar": 24}
EXPERTS = {"num_experts_per_tok": 2, "kv_heads": 2}
LATENT: dict[str, Any] = {
    "layers": 3,
    "kv_heads": 4,
    "head_dim": None,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
}
MSCALE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "qwen2": {"kind": "qwen2"},
    "qwen2-yarn": {
        "kind": "qwen2",
        "rope": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "smollm3": {"kind": "smollm3", "layers": 3, "no_rope_layer_interval": 2},
    "olmo2": {"kind": "olmo2"},
    "granite": {
        "kind": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.5,
    },
    "phi3": {"kind": "phi3", "head_dim": None, "rope": LONG},
    "phi4-mini": {"kind": "phi3", "head_dim": None, "rope": {**LONG, **PART}, "tie": True},
    "phi4-mini-beyond-its-first-context": {
        "kind": "phi3",
        "head_dim": None,
        "rope": {**LONG, **PART},
        "original_max_position_embeddings": 20,
        "sliding_window": 18,
    },
    "gemma2": {"kind": "gemma2", "tie": True, "sliding_window": 7, **GEMMA},
    "gemma3": {
        "kind": "gemma3_text",
        "layers": 3,
        "sliding_window": 7,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 9.0,
        "rope": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
        },
        **GEMMA,
    },
    "glm": {"kind": "glm", "rope": HALF, "attention_bias": True},
    "glm4": {"kind": "glm4", "rope": HALF, "attention_bias": True},
    "gpt-oss": {
        "kind": "gpt_oss",
        "layers": 3,
        "num_local_experts": 5,
        "sliding_window": 7,
        "swiglu_limit": 1.5,
        "rope": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
        **EXPERTS,
    },
    "deepseek-v2": {
        "kind": "deepseek_v2",
        **LATENT,
        "topk_method": "group_limited_greedy",
        "rope": MSCALE,
    },
    "deepseek-v2-lite": {"kind": "deepseek_v2", **LATENT, "q_lora_rank": None},
    "deepseek-v3": {"kind": "deepseek_v3", **LATENT, "rope": MSCALE},
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


NEW_TOKENS = 20


def check_tokens_and_logits_are_those_of_transformers(
    backend: str, case: str, tmp_path: Path
) -> None:
    directory = make_checkpoint(tmp_path / case, **CASES[case])
    ours = check_logits(directory, backend)
    assert len(set(ours)) > NEW_TOKENS // 3  # not the same few tokens repeated


def check_logits(directory: Path, backend: str, room: float = 1e-4, best: bool = True) -> list[int]:
    """Returns the tokens that follow a prompt. Asserts that the logits of the last token are within
    `room` of transformers' and, if `best`, that the tokens equal transformers'.
    """
    prompt = [int(t) for t in np.random.default_rng(5).integers(0, 258, 21)]
    chosen, _ = registry.choose(backend)
    checkpoint = Checkpoint.open(directory)
    device = chosen.open(0)
    try:
        with Generator(checkpoint, chosen, device, chunk=8) as generator:
            ours = list(generator.stream(prompt, NEW_TOKENS, stop_tokens=()))
            last = generator.executor.read("decode.head.logits").ravel()
    finally:
        device.close()
    model = reference(directory)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ours[:-1]])).logits[0].numpy()
    assert not best or ours == logits[len(prompt) - 1 :].argmax(-1).tolist()
    np.testing.assert_allclose(last, logits[-1], rtol=room, atol=room)
    compared(checkpoint, backend)
    return ours


def best(directory: Path, prompt: list[int], ours: list[int]) -> list[int]:
    """Returns transformers' most likely token at each position, given our tokens as the history."""
    model = reference(directory)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ours[:-1]])).logits[0].numpy()
    results: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return results
