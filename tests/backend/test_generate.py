"""Checkpoints through the loop kernel against transformers on the same directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import ark
from ark.backend import registry
from ark.errors import GpuError, InvalidUsageError, SystemError
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator, Sampling
from tests.checkpoints import LLAMA3_ROPE, make_checkpoint

NOAH = Path(__file__).resolve().parents[2] / "examples/noah"

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32-sharded-untied-gqa4": {"shards": 3, "heads": 8, "kv_heads": 2, "head_dim": 8},
    "fp32-tied-mha-llama3": {"tie": True, "kv_heads": 4, "rope": LLAMA3_ROPE},
    "fp32-wide-heads-odd-sizes": {
        "head_dim": 32,
        "hidden": 72,
        "intermediate": 100,
        "vocab": 333,
        "heads": 3,
        "kv_heads": 1,
    },
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
}


def tokens_of(directory: Path, backend: str, prompt: list[int], count: int, **kw: Any) -> list[int]:
    """Greedy tokens from ark, without stop tokens."""
    chosen, _ = registry.choose(backend)
    device = chosen.open(0)
    try:
        with Generator(Checkpoint.open(directory), chosen, device, **kw) as generator:
            return list(generator.stream(prompt, count, stop_tokens=()))
    finally:
        device.close()


def same_up_to_ties(model: Any, prompt: list[int], ours: list[int], room: float) -> None:
    """Each token's logit is within `room` of the best, with our own tokens as history."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ours])).logits[0].float()
    for i, token in enumerate(ours):
        row = logits[len(prompt) - 1 + i]
        assert float(row.max() - row[token]) <= room, f"token {i}: {token}"


@pytest.mark.parametrize("case", sorted(CASES))
def test_greedy_tokens_equal_those_of_transformers(backend: str, case: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / case, **CASES[case])
    rng = np.random.default_rng(5)
    vocab = CASES[case].get("vocab", 320)
    prompt = [int(t) for t in rng.integers(0, vocab, 21)]
    ours = tokens_of(directory, backend, prompt, 24, chunk=8)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if "dtype" in CASES[case]:
        same_up_to_ties(model, prompt, ours, 0.02)
        return
    with torch.inference_mode():
        theirs = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0].tolist()[len(prompt) :]
    assert ours == theirs


def test_the_shipped_checkpoint_equals_transformers_up_to_ties(backend: str) -> None:
    prompt = list(range(40, 71))
    ours = tokens_of(NOAH, backend, prompt, 32)
    model = LlamaForCausalLM.from_pretrained(NOAH, dtype=torch.float32).eval()
    same_up_to_ties(model, prompt, ours, 0.05)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("small"), layers=1, hidden=32, intermediate=48)


@pytest.fixture
def generator(backend: str, small: Path) -> Any:
    chosen, _ = registry.choose(backend)
    device = chosen.open(0)
    with Generator(Checkpoint.open(small), chosen, device, chunk=4, budget_s=5.0) as made:
        yield made
    device.close()


def test_chunks_and_prompt_lengths_do_not_change_the_tokens(generator: Generator) -> None:
    """A prompt of one token has no prompt phase; 4 fits a chunk less one; others straddle."""
    prompt = list(range(5, 25))
    with_history = {n: list(generator.stream(prompt[:n], 6, stop_tokens=())) for n in (1, 4, 5, 6)}
    for n, made in with_history.items():
        again = list(generator.stream(prompt[:n] + made[:3], 3, stop_tokens=()))
        assert again == made[3:6], n


def test_a_stop_token_ends_the_loop_on_the_device(generator: Generator) -> None:
    free = list(generator.stream([7, 8, 9], 12, stop_tokens=()))
    stop = free[4]
    first = free.index(stop)
    assert list(generator.stream([7, 8, 9], 12, stop_tokens=[stop])) == free[: first + 1]


def test_sampling_is_seeded_and_follows_the_softmax(generator: Generator) -> None:
    def draw(seed: int, **kw: Any) -> list[int]:
        how = Sampling(temperature=1.0, seed=seed, **kw)
        return list(generator.stream([3, 1, 4], 1, how, stop_tokens=()))

    assert draw(11) == draw(11)
    model = LlamaForCausalLM.from_pretrained(generator.checkpoint.directory).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[3, 1, 4]])).logits[0, -1].double()
    counts = np.zeros(len(logits))
    for seed in range(400):
        counts[draw(seed)[0]] += 1
    expected = torch.softmax(logits, 0).numpy() * 400
    # Pearson's statistic over the likely tokens; its mean is the number of cells, its deviation
    # sqrt(2 cells). The draws are fixed by their seeds, so this cannot flicker.
    cells = expected > 4
    statistic = float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
    assert statistic < cells.sum() + 4 * np.sqrt(2 * cells.sum())


def test_top_k_draws_only_from_the_best(generator: Generator) -> None:
    model = LlamaForCausalLM.from_pretrained(generator.checkpoint.directory).eval()
    with torch.inference_mode():
        best = model(torch.tensor([[3, 1, 4]])).logits[0, -1].topk(3).indices.tolist()
    seen = {
        next(iter(generator.stream([3, 1, 4], 1, Sampling(5.0, 3, seed), stop_tokens=())))
        for seed in range(60)
    }
    assert seen == set(best)
    greedy = list(generator.stream([3, 1, 4], 1, Sampling(1.0, 1, 9), stop_tokens=()))
    assert greedy == best[:1]


def test_the_context_bounds_what_is_made(generator: Generator) -> None:
    room = generator.context
    prompt = [int(t) for t in np.arange(room - 3) % 300]
    assert len(list(generator.stream(prompt, 50, stop_tokens=()))) == 3
    with pytest.raises(InvalidUsageError, match="context holds"):
        list(generator.stream([*prompt, 1, 2, 3], 1))


@pytest.mark.parametrize(
    ("prompt", "count", "words"),
    [([], 1, "no tokens"), ([320], 1, "token 320"), ([-1], 1, "token -1"), ([1], 0, "0 new")],
)
def test_bad_requests_are_refused_before_anything_runs(
    generator: Generator, prompt: list[int], count: int, words: str
) -> None:
    with pytest.raises(InvalidUsageError, match=words):
        list(generator.stream(prompt, count))


def test_a_bad_token_on_the_device_is_reported_and_the_process_goes_on(
    generator: Generator,
) -> None:
    """An id that slips past the host's check must not read out of bounds."""
    before = list(generator.stream([7, 8, 9], 4, stop_tokens=()))
    generator.executor.write("tokens", np.array([7, 9999, 9], np.int32))
    generator.executor.write("position", np.array([1], np.int32))
    with pytest.raises(GpuError, match=r"index 9999.*out of range \(expected 0 to 319\)"):
        generator.executor.start(1).wait(20)
    assert list(generator.stream([7, 8, 9], 4, stop_tokens=())) == before


def test_leaving_a_stream_early_stops_the_kernel(generator: Generator) -> None:
    whole = list(generator.stream([7, 8, 9], 30, stop_tokens=()))
    stream = generator.stream([7, 8, 9], 30, stop_tokens=())
    assert next(stream) == whole[0]
    stream.close()
    assert list(generator.stream([7, 8, 9], 30, stop_tokens=())) == whole


def test_too_little_memory_is_said_before_loading(
    backend: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, _ = registry.choose(backend)
    device = chosen.open(0)
    monkeypatch.setattr(type(device), "free_bytes", lambda self: 1000)
    with pytest.raises(SystemError, match=r"needs .* MB of device memory"):
        Generator(Checkpoint.open(small), chosen, device)
    device.close()


def test_version_is_exported() -> None:
    assert ark.version() == ark.__version__
