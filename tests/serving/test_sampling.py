"""An engine with all options of SamplingParams: each request's ids equal those of its solo run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ark.backend import registry
from ark.errors import InvalidUsageError
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.models.sampling import SamplingParams
from ark.serving.engine import Engine
from ark.serving.types import Event, Request
from tests.checkpoints import make_checkpoint
from tests.serving.requests import MAX_POSITIONS, Listener

OTHERS = [
    {"temperature": 0.0, "repetition_penalty": 1.6},
    {"temperature": 0.9, "top_p": 0.8, "logprobs": 2},
    {"temperature": 0.0, "logit_bias": {7: 3.0, 9: -4.0}, "logprobs": 0},
    {"temperature": 1.2, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.0, "min_tokens": 6},
    {"temperature": 0.7, "typical_p": 0.7, "top_k": 30},
    {"temperature": 0.0},
    {"temperature": 0.0, "suppress_tokens": tuple(range(0, 320, 2))},
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory: Path = tmp_path_factory.mktemp("small")
    return Checkpoint.open(make_checkpoint(directory, layers=1, hidden=32, intermediate=48))


def requests() -> list[Request]:
    rng = np.random.default_rng(3)
    given = []
    for number in range(2 * len(OTHERS)):
        prompt = tuple(map(int, rng.integers(0, 320, rng.integers(1, 30))))
        fields = OTHERS[number % len(OTHERS)]
        how = SamplingParams(seed=number, max_tokens=14, **fields)  # type: ignore[arg-type]
        stops = frozenset(map(int, rng.integers(0, 320, 12)))
        given.append(Request(f"request {number}", prompt, how, stops))
    return given


def test_requests_give_the_text_of_their_solo_runs(small: Checkpoint) -> None:
    """With fewer slots than requests and too few pages, rows change their requests; each text
    equals that of its solo run.
    """
    given, listener = requests(), Listener()
    events: dict[str, list[Event]] = {request.id: [] for request in given}

    def hear(event: Event) -> None:
        events[event.id].append(event)
        listener(event)

    ways = {"slots": 3, "context": MAX_POSITIONS, "page": 8, "pages": 9, "chunk": 8, "draft": 2}
    with Engine.open(small, "cpu", sampling="full", max_logprobs=2, **ways) as engine:  # type: ignore[arg-type]
        for request in given:
            engine.submit(request, hear)
        listener.wait(*events)
        assert engine.stats().preemptions > 0
    chosen, _ = registry.choose("cpu")
    how = {"context": MAX_POSITIONS, "chunk": 8, "sampling": "full", "max_logprobs": 2}
    with (
        closing(chosen.open(0)) as device,
        Generator(small, chosen, device, **how) as generator,  # type: ignore[arg-type]
    ):
        for request in given:
            stops = sorted(request.stop_token_ids)
            text = list(generator.stream(request.prompt, 14, request.sampling, stops))
            assert listener.tokens[request.id] == text, request
            asked = request.sampling.logprobs
            reported = [lp for event in events[request.id] for lp in event.logprobs]
            tops = [best for event in events[request.id] for best in event.top_logprobs]
            assert len(reported) == len(tops) == (0 if asked is None else len(text))
            for i, (own, best) in enumerate(zip(reported, tops, strict=True)):
                right, highest = generator.logprobs(len(request.prompt) + i)
                assert own == pytest.approx(right, abs=1e-5)
                assert list(best) == list(highest)
                assert len(best) == asked


def test_sampling_without_support_in_the_engine_is_refused(small: Checkpoint) -> None:
    ways = {"slots": 1, "context": MAX_POSITIONS, "chunk": 0}
    cases = (
        ("full", SamplingParams(n=2), "n=2 is out of range"),
        ("full", SamplingParams(logprobs=1), "reports at most 0"),
        ("full", SamplingParams(logit_bias={320: 1.0}), "name the token 320"),
        ("", SamplingParams(top_p=0.5, logprobs=0), "top_p, logprobs of the sampling"),
    )
    for kind in ("full", ""):
        with Engine.open(small, "cpu", sampling=kind, **ways) as engine:  # type: ignore[arg-type]
            for sampling, params, words in cases:
                if sampling == kind:
                    with pytest.raises(InvalidUsageError, match=words):
                        engine.submit(Request("x", (1,), params), print)
