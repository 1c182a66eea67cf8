"""Checkpoints run by the loop kernel, compared with transformers on the same directory."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import ark
from ark.backend import registry
from ark.errors import GpuError, InvalidUsageError, SystemError
from ark.ir.dtype import DataType
from ark.models import generate
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.models.plans import plans
from ark.models.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE, SamplingParams
from ark.models.sequences import write_sequences
from tests.checkpoints import LLAMA3_ROPE, make_checkpoint
from tests.emulated import few_emulated

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
    """Returns ark's greedy tokens, without stop tokens."""
    chosen, _ = registry.choose(backend)
    device = chosen.open(0)
    try:
        with Generator(Checkpoint.open(directory), chosen, device, **kw) as generator:
            return list(generator.stream(prompt, count, stop_tokens=()))
    finally:
        device.close()


def same_up_to_ties(model: Any, prompt: list[int], ours: list[int], room: float) -> None:
    """Asserts that transformers' logit of each of our tokens is within `room` of its best one,
    given our own earlier tokens.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ours])).logits[0].float()
    for i, token in enumerate(ours):
        row = logits[len(prompt) - 1 + i]
        assert float(row.max() - row[token]) <= room, f"token {i}: {token}"


@pytest.mark.parametrize("case", few_emulated(sorted(CASES), "bf16"))
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


@pytest.mark.emulated("slow")
def test_shipped_checkpoint_equals_transformers_up_to_ties(backend: str) -> None:
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
    with Generator(Checkpoint.open(small), chosen, device, chunk=4, budget_s=5.0) as opened:
        yield opened
    device.close()


def test_chunks_and_prompt_lengths_do_not_change_the_tokens(generator: Generator) -> None:
    """The tokens do not depend on how a prompt is divided into chunks. The lengths are one token,
    which has no prompt phase, a chunk plus one token, and more.
    """
    prompt = list(range(5, 25))
    with_history = {n: list(generator.stream(prompt[:n], 6, stop_tokens=())) for n in (1, 4, 5, 6)}
    for n, drawn in with_history.items():
        repeated = list(generator.stream(prompt[:n] + drawn[:3], 3, stop_tokens=()))
        assert repeated == drawn[3:6], n


@pytest.mark.emulated("slow")
def test_large_chunk_draws_the_first_token_itself(backend: str, tmp_path: Path) -> None:
    """The last chunk of a prompt runs in a separate phase of the kernel, which samples the first
    new token. The token's row may be any of the chunk's rows.
    """
    directory = make_checkpoint(
        tmp_path / "long", layers=1, hidden=32, intermediate=48, context=300
    )
    chosen, _ = registry.choose(backend)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompt = [int(t) for t in np.random.default_rng(1).integers(0, 320, 260)]
    with (
        contextlib.closing(chosen.open(0)) as device,
        Generator(Checkpoint.open(directory), chosen, device, chunk=128) as generator,
    ):
        assert [p.name for p in generator.executor.plan.phases] == ["prompt", "begin", "decode"]
        for length in (1, 2, 127, 128, 129, 256, 257):
            drawn = list(generator.stream(prompt[:length], 3, stop_tokens=()))
            assert len(drawn) == 3
            same_up_to_ties(model, prompt[:length], drawn, 0.01)
        first = next(iter(generator.stream(prompt[:130], 1, stop_tokens=())))
        ended = list(generator.stream(prompt[:130], 9, stop_tokens=[first]))
        assert ended == [first]  # ended by the chunk that drew it; no later kernel does work


def test_stop_token_ends_the_loop_on_the_device(generator: Generator) -> None:
    free = list(generator.stream([7, 8, 9], 12, stop_tokens=()))
    stop = free[4]
    first = free.index(stop)
    assert list(generator.stream([7, 8, 9], 12, stop_tokens=[stop])) == free[: first + 1]
    # This call passes more stop tokens than the device has memory for, and only the last of them
    # occurs in the text. The host checks the stop tokens that the device cannot.
    others = [t for t in range(320) if t not in free]
    assert list(generator.stream([7, 8, 9], 12, stop_tokens=[*others, stop])) == free[: first + 1]


def test_sampling_options_without_support_in_the_plan_are_refused(generator: Generator) -> None:
    with pytest.raises(InvalidUsageError, match="does not support top_p of the sampling"):
        list(generator.stream([7], 1, SamplingParams(top_p=0.5)))


@pytest.mark.emulated("slow")
def test_sampling_is_seeded_and_follows_the_softmax(generator: Generator) -> None:
    def draw(seed: int, **kw: Any) -> list[int]:
        how = SamplingParams(temperature=1.0, seed=seed, **kw)
        return list(generator.stream([3, 1, 4], 1, how, stop_tokens=()))

    assert draw(11) == draw(11)
    model = LlamaForCausalLM.from_pretrained(generator.checkpoint.directory).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[3, 1, 4]])).logits[0, -1].double()
    counts = np.zeros(len(logits))
    for seed in range(400):
        counts[draw(seed)[0]] += 1
    expected = torch.softmax(logits, 0).numpy() * 400
    # Pearson's statistic over the likely tokens: its mean is the number of tokens that it sums
    # over, n, and its standard deviation sqrt(2 n). The seeds are fixed, so the test is
    # deterministic.
    cells = expected > 4
    statistic = float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
    assert statistic < cells.sum() + 4 * np.sqrt(2 * cells.sum())


def mixed(z: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea and Flood 2014), the kernel's generator."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@pytest.mark.emulated("slow")
def test_sampling_noise_is_finite(generator: Generator) -> None:
    """The Gumbel noise of a draw is finite. If a uniform number were rounded to 1, its token would
    always win.
    """
    greedy = list(generator.stream([3], 1, stop_tokens=()))
    tokens = np.arange(320, dtype=np.uint64)
    seeds = np.arange(100_000, dtype=np.uint64)
    tokens = tokens[tokens != greedy[0]]
    drawn = mixed(mixed(mixed(seeds))[:, None] ^ tokens) >> np.uint64(40)
    seed = int((drawn == 0xFFFFFF).any(1).argmax())
    assert (drawn[seed] == 0xFFFFFF).any()
    assert (
        list(
            generator.stream(
                [3], 1, SamplingParams(temperature=1e-3, top_k=0, seed=seed), stop_tokens=()
            )
        )
        == greedy
    )


@pytest.mark.emulated("slow")
def test_top_k_draws_only_from_the_best(generator: Generator) -> None:
    model = LlamaForCausalLM.from_pretrained(generator.checkpoint.directory).eval()
    with torch.inference_mode():
        best = model(torch.tensor([[3, 1, 4]])).logits[0, -1].topk(3).indices.tolist()
    seen = {
        next(
            iter(
                generator.stream(
                    [3, 1, 4],
                    1,
                    SamplingParams(temperature=5.0, top_k=3, seed=seed),
                    stop_tokens=(),
                )
            )
        )
        for seed in range(60)
    }
    assert seen == set(best)
    greedy = list(
        generator.stream(
            [3, 1, 4], 1, SamplingParams(temperature=1.0, top_k=1, seed=9), stop_tokens=()
        )
    )
    assert greedy == best[:1]


def test_new_tokens_end_with_the_context(generator: Generator) -> None:
    room = generator.context
    prompt = [int(t) for t in np.arange(room - 3) % 300]
    assert len(list(generator.stream(prompt, 50, stop_tokens=()))) == 3
    with pytest.raises(InvalidUsageError, match="context holds"):
        list(generator.stream([*prompt, 1, 2, 3], 1))


@pytest.mark.parametrize(
    ("prompt", "count", "words"),
    [
        ([], 1, "no tokens"),
        ([320], 1, "token 320"),
        ([-1], 1, "token -1"),
        ([1], 0, "max_new_tokens=0"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(
    generator: Generator, prompt: list[int], count: int, words: str
) -> None:
    with pytest.raises(InvalidUsageError, match=words):
        list(generator.stream(prompt, count))


def test_bad_token_on_the_device_is_reported_and_the_process_goes_on(
    generator: Generator,
) -> None:
    """A token id out of range that is written after the host's check gives an error, and nothing is
    read out of bounds.
    """
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


@pytest.mark.parametrize("temperature", [1e-39, 1e-6, 1e39, -1.0, float("nan"), float("inf")])
def test_temperature_that_logits_cannot_be_divided_by(temperature: float) -> None:
    with pytest.raises(InvalidUsageError, match="it must be 0"):
        SamplingParams(temperature=temperature)


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, MAX_TEMPERATURE])
def test_extreme_temperatures_are_served(generator: Generator, temperature: float) -> None:
    """The lowest temperature gives the greedy tokens. The highest one draws all tokens with equal
    probability.
    """
    greedy = list(generator.stream([7, 8, 9], 8, stop_tokens=()))
    drawn = list(
        generator.stream(
            [7, 8, 9], 8, SamplingParams(temperature=temperature, top_k=0, seed=3), stop_tokens=()
        )
    )
    assert (drawn == greedy) == (temperature == MIN_TEMPERATURE)


def test_kernel_that_ends_early_is_an_error(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a kernel ends before it has generated all tokens (its limit on the device is lowered), the
    host raises an error instead of returning a shorter text.
    """

    def lower(runner: Any, shape: Any, prompts: Any, totals: list[int], *how: Any) -> None:
        write_sequences(runner, shape, prompts, [total - 4 for total in totals], *how)

    monkeypatch.setattr(generate, "write_sequences", lower)
    drawn = []
    with pytest.raises(GpuError, match=r"ended after 8 of 12 iterations"):
        for token in generator.stream([7], 12, stop_tokens=()):
            drawn.append(token)
    assert len(drawn) == 8


@pytest.mark.emulated("slow")
def test_nan_weights_are_an_error(backend: str, small: Path, tmp_path: Path) -> None:
    """Weights that are NaN give an error. Otherwise token 0 would be chosen repeatedly."""
    from safetensors.numpy import load_file, save_file

    directory = tmp_path / "nan"
    shutil.copytree(small, directory)
    held = load_file(directory / "model.safetensors")
    held["model.norm.weight"][:] = np.nan
    save_file(held, directory / "model.safetensors")
    with pytest.raises(GpuError, match="read only NaN logits"):
        tokens_of(directory, backend, [7, 8, 9], 4)


@pytest.mark.parametrize("chunk", [1, 8, 32])
@pytest.mark.emulated("slow")
def test_plan_brings_its_own_chunk_and_context(backend: str, small: Path, chunk: int) -> None:
    """A Generator with a given plan uses the plan's chunk size, whatever chunk size the caller
    passes.
    """
    prompt = [int(t) for t in np.random.default_rng(0).integers(0, 300, 27)]
    expected = tokens_of(small, backend, prompt, 6, chunk=4)
    chosen, _ = registry.choose(backend)
    device = chosen.open(0)
    checkpoint = Checkpoint.open(small)
    dtype = DataType.from_numpy(checkpoint.dtype)
    plan = plans(Shape(checkpoint.config, dtype, 100, chunk), device.machine)[0]
    with Generator(checkpoint, chosen, device, plan=plan, chunk=4) as generator:
        assert generator.context == 100
        assert list(generator.stream(prompt, 6, stop_tokens=())) == expected
    device.close()


@pytest.mark.emulated("slow")
def test_plan_without_a_prompt_phase(backend: str, small: Path) -> None:
    chosen, _ = registry.choose(backend)
    device = chosen.open(0)
    checkpoint = Checkpoint.open(small)
    dtype = DataType.from_numpy(checkpoint.dtype)
    plan = plans(Shape(checkpoint.config, dtype, 100, 0), device.machine)[0]
    with Generator(checkpoint, chosen, device, plan=plan) as generator:
        one = list(generator.stream([7], 6, stop_tokens=()))
        with pytest.raises(InvalidUsageError, match="no prompt phase"):
            list(generator.stream([7, 8], 6))
    device.close()
    assert one == tokens_of(small, backend, [7], 6, chunk=4)


def test_plan_that_contradicts_itself(backend: str, small: Path) -> None:
    chosen, _ = registry.choose(backend)
    device = chosen.open(0)
    checkpoint = Checkpoint.open(small)
    dtype = DataType.from_numpy(checkpoint.dtype)
    plan = plans(Shape(checkpoint.config, dtype, 100, 8), device.machine)[0]
    other = dataclasses.replace(plan, meta={**plan.meta, "chunk": 4})
    with pytest.raises(InvalidUsageError, match=r"reads 4 prompt tokens .* advance by \[8\]"):
        Generator(checkpoint, chosen, device, plan=other)
    device.close()


def test_too_little_memory_is_reported_before_loading(
    backend: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, _ = registry.choose(backend)
    device = chosen.open(0)
    monkeypatch.setattr(type(device), "free_bytes", lambda self: 1000)
    with pytest.raises(SystemError, match=r"needs [\d.]+ [KM]B .* free only 1\.00 KB"):
        Generator(Checkpoint.open(small), chosen, device)
    device.close()


def test_version_is_exported() -> None:
    assert ark.version() == ark.__version__
