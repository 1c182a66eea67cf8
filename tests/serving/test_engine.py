"""The engine on a device: requests give the ids that they give alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import pytest

from ark.backend import registry
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.models.request import Sampling
from ark.models.sampling import SamplingParams
from ark.serving.engine import Engine, forms_of
from ark.serving.types import Event, FinishReason, Request
from tests.checkpoints import make_checkpoint

CONTEXT, WAIT_S = 64, 120.0


@dataclass
class Listener:
    """Collects the events of requests."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finish: dict[str, FinishReason] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    news: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, event: Event) -> None:
        with self.news:
            assert event.id not in self.finish
            self.tokens.setdefault(event.id, []).extend(event.tokens)
            if event.finish is not None:
                self.finish[event.id] = event.finish
                self.errors[event.id] = event.error
            self.news.notify_all()

    def wait(self, *ids: str, tokens: int | None = None) -> None:
        """Until these requests have ended, or have made so many tokens."""

        def there(request: str) -> bool:
            enough = tokens is not None and len(self.tokens.get(request, ())) >= tokens
            return request in self.finish or enough

        with self.news:
            assert self.news.wait_for(lambda: all(map(there, ids)), WAIT_S), "no event in time"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("small")
    return Checkpoint.open(make_checkpoint(directory, layers=2, hidden=32, intermediate=48))


def requests(count: int, seed: int = 0, most: int = 50) -> list[Request]:
    """Prompts of all lengths, half of them sampled, some of which stop early."""
    rng = np.random.default_rng(seed)
    given = []
    for number in range(count):
        prompt = tuple(map(int, rng.integers(0, 320, rng.integers(1, most))))
        how = SamplingParams(
            temperature=0.8 * (number % 2),
            top_k=40 * (number % 4 == 3),
            seed=number,
            max_tokens=int(rng.integers(1, 30)),
        )
        stops = frozenset(map(int, rng.integers(0, 320, number % 20)))
        given.append(Request(f"request {number}", prompt, how, stops))
    return given


def alone(checkpoint: Checkpoint, given: Sequence[Request]) -> dict[str, list[int]]:
    """By request, what a Generator makes of it."""
    chosen, _ = registry.choose("cpu")
    texts = {}
    with (
        closing(chosen.open(0)) as device,
        Generator(checkpoint, chosen, device, context=CONTEXT, chunk=16) as generator,
    ):
        for request in given:
            sampling = request.sampling
            assert sampling.seed is not None and sampling.max_tokens is not None
            how = Sampling(sampling.temperature, sampling.top_k, sampling.seed)
            text: list[int] = []
            for token in generator.stream(request.prompt, sampling.max_tokens, how, ()):
                text.append(token)
                if token in request.stop_token_ids:
                    break
            texts[request.id] = text
    return texts


@pytest.fixture(scope="module")
def wanted(small: Checkpoint) -> dict[str, list[int]]:
    return alone(small, requests(24))


WAYS = {
    "chunks": {},
    "token by token": {"chunk": 0},
    "pages that run out": {"pages": 9},
    "chunks that are not whole pages": {"chunk": 5, "page": 4},
    "one slot": {"slots": 1},
}


@pytest.fixture(params=WAYS)
def engine(request: pytest.FixtureRequest, small: Checkpoint) -> Iterator[Engine]:
    asked = {"slots": 4, "context": CONTEXT, "page": 8, **WAYS[request.param]}
    with Engine.open(small, "cpu", budget_s=20.0, **asked) as opened:
        yield opened


def test_requests_give_the_ids_of_their_solo_runs(
    engine: Engine, wanted: dict[str, list[int]]
) -> None:
    """Requests arrive one after the other while others run; slots and pages are free at the end."""
    listener = Listener()
    given = requests(24)
    for number, request in enumerate(given):
        engine.submit(request, listener)
        if number % 5 == 4:
            listener.wait(given[number - 4].id, tokens=1)
    listener.wait(*(request.id for request in given))
    assert listener.tokens == wanted
    for request in given:
        stopped = wanted[request.id][-1] in request.stop_token_ids
        want = FinishReason.STOP if stopped else FinishReason.LENGTH
        assert listener.finish[request.id] == want
    engine.close()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)
    assert stats.generated_tokens == sum(map(len, wanted.values()))
    assert stats.prompt_tokens == sum(len(request.prompt) for request in given)
    assert stats.slot_ids == ("",) * stats.slots
    assert (stats.preemptions > 0) == (stats.pages == 9)


def test_forms_are_powers_of_two_and_all_slots() -> None:
    assert [forms_of(n) for n in (1, 2, 3, 8, 12)] == [
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 4, 8),
        (1, 2, 4, 8, 12),
    ]
