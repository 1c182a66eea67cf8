"""Decoders other than Llama, each with a tiny random checkpoint: tokens and logits equal
transformers'.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ark.backend import registry
from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from tests.cases.decoders import (
    CASES,
    EXPERTS,
    NEW_TOKENS,
    best,
    check_logits,
    check_tokens_and_logits_are_those_of_transformers,
)
from tests.checkpoints import make_checkpoint
from tests.slow import slow

pytestmark = pytest.mark.emulated("slow")


SLIDING = {"use_sliding_window": True, "sliding_window": 11}
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"kind": "mistral", "sliding_window": 5},
    "mistral-longer-than-the-prompt": {"kind": "mistral", "sliding_window": 30, "tie": True},
    "mistral-one-position": {"kind": "mistral", "sliding_window": 1},
    "mixtral": {"kind": "mixtral", "num_local_experts": 3, "sliding_window": 9, **EXPERTS},
    "qwen3-one-of-two-layers": {"kind": "qwen3", "max_window_layers": 1, **SLIDING},
    "qwen3-no-layer": {"kind": "qwen3", "max_window_layers": 2, **SLIDING},
    "qwen3-layer-types": {
        "kind": "qwen3",
        "layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        **SLIDING,
    },
    "qwen3-moe": {
        "kind": "qwen3_moe",
        "num_experts": 3,
        "moe_intermediate_size": 40,
        **SLIDING,
        **EXPERTS,
    },
}
DEFAULT_WINDOWS = ("mistral", "qwen3-layer-types")


@pytest.fixture
def device(backend: str) -> Iterator[tuple[Backend, Device]]:
    chosen, _ = registry.choose(backend)
    with closing(chosen.open(0)) as opened:
        yield chosen, opened


@pytest.mark.parametrize("case", sorted(CASES))
def test_tokens_and_logits_are_those_of_transformers(
    backend: str, case: str, tmp_path: Path
) -> None:
    check_tokens_and_logits_are_those_of_transformers(backend, case, tmp_path)


@pytest.mark.parametrize(
    "case", [c if c in ("glm4", "gemma2") else pytest.param(c, marks=slow) for c in sorted(CASES)]
)
def test_weights_of_16_bits(backend: str, case: str, tmp_path: Path) -> None:
    """Decoders with weights of 16 bits give transformers' logits. Their norms and biases may be
    fp32.
    """
    directory = make_checkpoint(tmp_path, **CASES[case], dtype="bfloat16")
    check_logits(directory, backend, room=0.05, best=False)


@slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("case", sorted(CASES))
def test_random_shapes(backend: str, case: str, seed: int, tmp_path: Path) -> None:
    """Decoders of random shapes give transformers' logits: numbers of heads, sizes that are not
    multiples of a vector, one to three layers.
    """
    rng = np.random.default_rng(seed)
    fields: dict[str, Any] = dict(CASES[case])
    kv_heads = int(rng.integers(1, 4))
    heads = kv_heads * int(rng.integers(1, 4))
    rope = dict(fields.get("rope", {}))
    width = int(rng.integers(1, 5)) * (8 if "partial_rotary_factor" in rope else 2)
    hidden = heads * int(rng.integers(3, 20))
    if "head_dim" in fields and fields["head_dim"] is None:
        hidden = heads * width
    else:
        fields["head_dim"] = width
    for name in {"short_factor", "long_factor"} & set(rope):
        pairs = int(width * rope.get("partial_rotary_factor", 1)) // 2
        rope[name] = [float(f) for f in rng.uniform(1, 9, pairs)]
    if "kv_lora_rank" in fields:  # all heads share the latent rows
        kv_heads = heads
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "moe_intermediate_size")
        fields |= {name: 2 * int(rng.integers(2, 25)) for name in sizes}  # even for transformers
        fields |= {
            "qk_rope_head_dim": 2 * int(rng.integers(1, 9)),
            "first_k_dense_replace": seed % 3,
        }
        fields |= {"q_lora_rank": seed % 2 * int(rng.integers(3, 50)) or None}
    fields |= {"rope": rope} if rope else {}
    fields |= {"heads": heads, "kv_heads": kv_heads, "hidden": hidden, "seed": seed}
    fields |= {"intermediate": int(rng.integers(5, 130)), "layers": int(rng.integers(1, 4))}
    directory = make_checkpoint(tmp_path, **{**fields, "vocab": int(rng.integers(258, 400))})
    check_logits(directory, backend)


@pytest.mark.parametrize(
    "case", [c if c in DEFAULT_WINDOWS else pytest.param(c, marks=slow) for c in sorted(WINDOWS)]
)
def test_layers_that_slide_attend_to_their_window(
    device: tuple[Backend, Device], case: str, tmp_path: Path
) -> None:
    """Layers with a sliding window attend to the keys in the window only: when a prompt is read in
    chunks, token by token, and beside other sequences.
    """
    directory = make_checkpoint(tmp_path / case, **WINDOWS[case])
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.config.max_position_embeddings == 128
    rng = np.random.default_rng(7)
    prompts = [[int(t) for t in rng.integers(0, 320, n)] for n in (21, 3)]
    with Generator(checkpoint, *device, chunk=8) as generator:
        alone = [list(generator.stream(p, NEW_TOKENS, stop_tokens=())) for p in prompts]
    for prompt, ours in zip(prompts, alone, strict=True):
        assert ours == best(directory, prompt, ours)
    with Generator(checkpoint, *device, batch=2) as generator:
        batched: list[list[int]] = [[], []]
        for row, token in generator.stream_batch(prompts, NEW_TOKENS, stop_tokens=()):
            batched[row].append(token)
    assert batched == alone


def test_prompt_longer_than_the_window_in_large_chunks(
    device: tuple[Backend, Device], tmp_path: Path
) -> None:
    """A prompt longer than the sliding window, in chunks of more than 128 rows. The last chunk,
    which samples the first token, starts after the window's length.
    """
    directory = make_checkpoint(
        tmp_path, kind="mistral", sliding_window=50, context=400, layers=1, hidden=32,
        intermediate=48,
    )  # fmt: skip
    prompt = [int(t) for t in np.random.default_rng(1).integers(0, 320, 300)]
    with Generator(Checkpoint.open(directory), *device, chunk=128) as generator:
        for length in (140, 300):
            ours = list(generator.stream(prompt[:length], 4, stop_tokens=()))
            assert ours == best(directory, prompt[:length], ours)
