"""Requests for tests of the engine, their texts when each is served alone, and a listener for
events.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np

from ark.backend import registry
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.models.sampling import SamplingParams
from ark.serving.types import EngineLike, Event, FinishReason, Request, Stats

MAX_POSITIONS, WAIT_S = 64, 120.0


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
        """Waits until these requests have ended or have generated the given number of tokens."""

        def there(request: str) -> bool:
            enough = tokens is not None and len(self.tokens.get(request, ())) >= tokens
            return request in self.finish or enough

        with self.news:
            assert self.news.wait_for(lambda: all(map(there, ids)), WAIT_S), "no event in time"


def settled(engine: EngineLike) -> Stats:
    """Waits until the last step has ended. Returns the engine's state: nothing runs, and all pages
    are free.
    """
    end = time.monotonic() + WAIT_S
    while True:
        stats = engine.stats()
        if (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages):
            return stats
        assert time.monotonic() < end, f"slots or pages are held: {stats}"
        time.sleep(0.001)


def random_requests(count: int, seed: int = 0, most: int = 50) -> list[Request]:
    """Returns requests with prompts of all lengths. Half are sampled, and some stop early."""
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


def solo_texts(checkpoint: Checkpoint, given: Sequence[Request]) -> dict[str, list[int]]:
    """Returns, by request, the text that a Generator produces."""
    chosen, _ = registry.choose("cpu")
    texts = {}
    with (
        closing(chosen.open(0)) as device,
        Generator(checkpoint, chosen, device, context=MAX_POSITIONS, chunk=16) as generator,
    ):
        for request in given:
            sampling = request.sampling
            assert sampling.max_tokens is not None
            how = replace(sampling, max_tokens=None)
            text: list[int] = []
            for token in generator.stream(request.prompt, sampling.max_tokens, how, ()):
                text.append(token)
                if token in request.stop_token_ids:
                    break
            texts[request.id] = text
    return texts
