"""A Generator with all options of SamplingParams, compared with transformers on the same
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from ark.backend import registry
from ark.errors import InvalidUsageError
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.models.sampling import SamplingParams
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.emulated("slow")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6]]
NEW_TOKENS = 10


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("small"), layers=1, hidden=32, intermediate=48)


@pytest.fixture(params=[1, 3], ids=["one", "batch"])
def generator(backend: str, small: Path, request: pytest.FixtureRequest) -> Iterator[Generator]:
    chosen, _ = registry.choose(backend)
    how: dict[str, Any] = {"batch": request.param} if request.param > 1 else {"chunk": 4}
    with ExitStack() as stack:
        device = stack.enter_context(closing(chosen.open(0)))
        checkpoint = Checkpoint.open(small)
        how |= {"sampling": "full", "max_logprobs": 3, "budget_s": 5.0}
        yield stack.enter_context(Generator(checkpoint, chosen, device, **how))


def theirs(small: Path, prompt: list[int], **how: Any) -> list[int]:
    model = LlamaForCausalLM.from_pretrained(small, dtype=torch.float32).eval()
    options = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False, **how}
    with torch.inference_mode():
        text = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=NEW_TOKENS,
            **options,
        )
    return text[0].tolist()[len(prompt) :]


def ours(generator: Generator, how: SamplingParams, stops: tuple[int, ...] = ()) -> list[list[int]]:
    prompts = PROMPTS[: generator.shape.batch]
    rows: list[list[int]] = [[] for _ in prompts]
    for sequence, token in generator.stream_batch(prompts, NEW_TOKENS, how, stops):
        rows[sequence].append(token)
    return rows


def test_greedy_tokens_under_penalties_equal_transformers(
    generator: Generator, small: Path
) -> None:
    plain = [theirs(small, prompt) for prompt in PROMPTS]
    never = plain[0][1]
    for how, fields in (
        (SamplingParams(temperature=0), {}),
        (SamplingParams(temperature=0, repetition_penalty=1.8), {"repetition_penalty": 1.8}),
        (SamplingParams(temperature=0, suppress_tokens=(never,)), {"suppress_tokens": [never]}),
        (
            SamplingParams(temperature=0, logit_bias={7: 4.0}),
            {"sequence_bias": {(7,): 4.0}},
        ),
    ):
        right = [theirs(small, prompt, **fields) for prompt in PROMPTS]  # type: ignore[arg-type]
        assert ours(generator, how) == right[: generator.shape.batch], how
        if fields:
            assert right != plain


def test_stop_tokens_wait_for_the_minimum(generator: Generator, small: Path) -> None:
    stop = theirs(small, PROMPTS[0])[0]
    right = [theirs(small, prompt, eos_token_id=stop, min_new_tokens=4) for prompt in PROMPTS]
    how = SamplingParams(temperature=0, min_tokens=4)
    assert ours(generator, how, (stop,)) == right[: generator.shape.batch]


def test_log_probabilities_are_those_of_the_logits(generator: Generator, small: Path) -> None:
    how = SamplingParams(temperature=0.7, top_p=0.8, seed=2, logprobs=2, presence_penalty=1.0)
    rows = ours(generator, how)
    model = LlamaForCausalLM.from_pretrained(small, dtype=torch.float32).eval()
    for sequence, (prompt, row) in enumerate(zip(PROMPTS, rows, strict=False)):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + row])).logits[0].double()
        log = torch.log_softmax(logits, -1)
        for i, token in enumerate(row):
            place = len(prompt) + i
            own, best = generator.logprobs(place, sequence)
            right = torch.topk(log[place - 1], 2)
            assert own == pytest.approx(float(log[place - 1, token]), abs=1e-4)
            assert list(best) == right.indices.tolist()
            np.testing.assert_allclose(list(best.values()), right.values, atol=1e-4)


def test_seed_gives_the_tokens_again(generator: Generator) -> None:
    def drawn(seed: int | None) -> list[list[int]]:
        return ours(generator, SamplingParams(temperature=1.5, min_p=0.01, seed=seed))

    assert drawn(5) == drawn(5) != drawn(6)
    assert drawn(None) != drawn(None)


def test_requests_that_the_plan_cannot_serve(generator: Generator) -> None:
    for how, stops, words in (
        (SamplingParams(logprobs=4), (), "reports at most 3"),
        (SamplingParams(logit_bias={320: 1.0}), (), "the token 320, but the vocabulary has 320"),
        (SamplingParams(min_tokens=2), tuple(range(17)), "holds back at most 16"),
    ):
        with pytest.raises(InvalidUsageError, match=words):
            ours(generator, how, stops)
