"""Several sequences in one plan: each gives the same tokens as alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from ark.backend import registry
from ark.errors import InvalidUsageError
from ark.models import sequences
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.models.sampling import SamplingParams
from ark.tasks.tokens import noise_key
from tests.checkpoints import make_checkpoint

LENGTHS = (1, 9, 4)
PROMPTS = [[int(t) for t in np.random.default_rng(n).integers(0, 320, n)] for n in LENGTHS]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("small"), layers=2, hidden=32, intermediate=48)


@pytest.fixture
def generator(backend: str, small: Path) -> Iterator[Generator]:
    """Yields a generator for three sequences."""
    chosen, _ = registry.choose(backend)
    with ExitStack() as stack:
        device = stack.enter_context(closing(chosen.open(0)))
        opened = Generator(Checkpoint.open(small), chosen, device, batch=3, budget_s=5.0)
        yield stack.enter_context(opened)


def batched(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    count: int,
    stops: Sequence[int] = (),
    how: SamplingParams | None = None,
) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in prompts]
    for sequence, token in generator.stream_batch(prompts, count, how, stops):
        tokens[sequence].append(token)
    return tokens


def test_each_sequence_equals_transformers(generator: Generator, small: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(small, dtype=torch.float32).eval()
    right = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            text = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0].tolist()
        right.append(text[len(prompt) :])
    assert batched(generator, PROMPTS, 12) == right
    assert batched(generator, PROMPTS[1:], 12) == right[1:]
    assert list(generator.stream(PROMPTS[1], 12, stop_tokens=())) == right[1]
    # A stop token ends only the sequence that draws it. When all sequences have ended, the launch
    # ends.
    stop = right[2][3]
    ends = [row[: row.index(stop) + 1] if stop in row else row for row in right]
    assert batched(generator, PROMPTS, 12, [stop]) == ends
    assert len(ends[2]) <= 4 < max(map(len, ends))
    firsts = [row[0] for row in right]
    assert batched(generator, PROMPTS, 12, firsts) == [[token] for token in firsts]
    # The positions in the device's memory have not moved past the stop tokens, either.
    assert generator.executor.read("position").tolist() == list(LENGTHS)


@pytest.mark.emulated("slow")
def test_each_sequence_samples_the_tokens_of_a_single_run(
    backend: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a temperature, each sequence of a batch gets the tokens that it gets alone. Each has its
    own random key and its own end of the context.
    """
    chosen, _ = registry.choose(backend)
    how = SamplingParams(temperature=1.0, top_k=40, seed=5)
    with closing(chosen.open(0)) as device:
        checkpoint = Checkpoint.open(small)
        with Generator(checkpoint, chosen, device, context=16, batch=3) as generator:
            drawn = batched(generator, PROMPTS, 12, how=how)
        with Generator(checkpoint, chosen, device, context=16, chunk=4) as generator:
            alone = [list(generator.stream(PROMPTS[0], 12, how, ()))]
            for b in (1, 2):
                monkeypatch.setattr(sequences, "noise_key", lambda seed, _, b=b: noise_key(seed, b))
                alone.append(list(generator.stream(PROMPTS[b], 12, how, ())))
    assert drawn == alone
    assert [len(row) for row in drawn] == [12, 7, 12]


@pytest.mark.emulated("slow")
def test_16_bit_sequences_equal_single_runs(backend: str, tmp_path: Path) -> None:
    """Sequences of a 16-bit model give the tokens of single runs, although matrix units multiply
    the rows of a batch and do not multiply a single row.
    """
    wide = {"hidden": 64, "intermediate": 128, "head_dim": 32, "dtype": "bfloat16"}
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path / "bf16", **wide))  # type: ignore[arg-type]
    chosen, _ = registry.choose(backend)
    with closing(chosen.open(0)) as device:
        with Generator(checkpoint, chosen, device, chunk=1, budget_s=5.0) as generator:
            alone = [list(generator.stream(p, 12, stop_tokens=())) for p in PROMPTS]
        offered = {v.name for v in device.machine.variants}
        for batch in (2, 3, 8):
            with Generator(checkpoint, chosen, device, batch=batch, budget_s=5.0) as generator:
                name = generator.executor.machine.variant.name
                assert name == ("roles" if "roles" in offered else "block")
                assert batched(generator, PROMPTS[:batch], 12) == alone[:batch]


def test_too_many_prompts_are_refused(generator: Generator) -> None:
    for prompts in ([], [[1]] * 4):
        with pytest.raises(InvalidUsageError, match=r"batch=3; give 1 to 3"):
            batched(generator, prompts, 1)


@pytest.mark.parametrize(
    ("prompts", "most", "words"),
    [
        ([1, 2], 4, "the prompt is 1; give a list of token ids"),
        (["a", "b"], 4, "the prompt is 'a'; give a list"),
        ([[1.5], [2]], 4, "a token of the prompt: 1.5 is not a whole number"),
        ([[1], [10**9]], 4, "has the token 1000000000"),
        ([[1], [2]], 1.5, "the number of new tokens: 1.5 is not a whole number"),
        ([[1], []], 4, "has no tokens"),
    ],
)
def test_invalid_prompts_are_refused(
    generator: Generator, prompts: list, most: int, words: str
) -> None:
    with pytest.raises(InvalidUsageError, match=words):
        batched(generator, prompts, most)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"world_size": 2}, "are decoded on one rank"),
        ({"chunk": 4}, "omit the chunk"),
        ({"batch": 65}, "1 to 64 sequences"),
        ({"batch": 0}, "1 to 64 sequences"),
    ],
)
def test_unsupported_batch_options_are_refused(small: Path, asked: dict, words: str) -> None:
    chosen, _ = registry.choose("cpu")
    with (
        closing(chosen.open(0)) as device,
        pytest.raises(InvalidUsageError, match=words),
    ):
        Generator(Checkpoint.open(small), chosen, device, **({"batch": 2} | asked))
