"""A soak of the engine on the CPU, without HTTP: requests arrive at random over 24 slots and few
pages, and a tenth of them is cancelled in any state.

python -m tests.serving.soak --requests 100000

Every text must equal that of the same request served alone; a cancelled one must be a prefix of it.
Every request ends exactly once. Memory, slots and pages return to their initial state.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ark.models.checkpoint import Checkpoint
from ark.models.sampling import SamplingParams
from ark.serving.engine import Engine
from ark.serving.types import Event, FinishReason, Request, Stats
from tests.serving.requests import MAX_POSITIONS, WAIT_S, Listener, settled, solo_texts

NOAH = Path(__file__).resolve().parents[2] / "examples/noah"
ENGINE_SLOTS = 24
MAX_OUTSTANDING = 3 * ENGINE_SLOTS  # requests that wait or run
PAGE, PAGES = 8, 44
REQUEST_KINDS = 200  # different requests
MEMORY_READINGS = 10  # in a soak
MAX_GROWTH_BYTES = 16 << 20  # after the second part
MAX_OWN_TOKENS, MAX_NEW_TOKENS = 20, 28
MEAN_PAUSE_S = 0.002


def kinds(count: int, vocabulary: int, draw: random.Random) -> list[Request]:
    """Returns `count` different kinds of requests, half of them sampled. Every second prompt has a
    common beginning.
    """
    beginning = [draw.randrange(vocabulary) for _ in range(20)]
    requests = []
    for number in range(count):
        own = [draw.randrange(vocabulary) for _ in range(draw.randint(1, MAX_OWN_TOKENS))]
        how = SamplingParams(
            temperature=0.8 * (number // 2 % 2),
            top_k=40 * (number % 8 == 3),
            seed=number,
            max_tokens=draw.randint(1, MAX_NEW_TOKENS),
        )
        stops = frozenset(draw.randrange(vocabulary) for _ in range(draw.randrange(20)))
        prompt = tuple(beginning * (number % 2) + own)
        requests.append(Request(f"kind {number}", prompt, how, stops))
    return requests


@dataclass
class Load(Listener):
    """The requests that have not ended. The text of each is checked when it ends. expected: the
    text of each kind of request.
    """

    expected: dict[str, list[int]] = field(default_factory=dict)
    outstanding: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if event.finish is None:
            return
        with self.news:
            self.outstanding.remove(event.id)
            tokens = self.tokens.pop(event.id)
            del self.finish[event.id], self.errors[event.id]
            wanted = self.expected[event.id.partition("/")[2]]
            if event.finish is FinishReason.CANCELLED:
                wanted = wanted[: len(tokens)]
            if tokens != wanted or event.finish is FinishReason.ERROR:
                self.faults.append(f"{event}: {tokens} in place of {wanted}")
            self.counts[event.finish.value] += 1
            self.counts["tokens"] += len(tokens)

    def until_fewer(self, count: int) -> None:
        """Waits until fewer than `count` requests are left."""
        with self.news:
            fewer = self.news.wait_for(lambda: len(self.outstanding) < count, WAIT_S)
            assert fewer, f"these do not end: {sorted(self.outstanding)}"


def serve(engine: Engine, load: Load, given: Sequence[Request], numbers: range) -> None:
    """Submits the requests with these numbers in bursts at random times, and cancels some at random
    ages.
    """
    draw, left = random.Random(numbers.start), list(reversed(numbers))
    while left:
        for _ in range(min(draw.randint(1, 6), len(left))):
            kind = draw.choice(given)
            request = replace(kind, id=f"{left.pop()}/{kind.id}")
            with load.news:
                load.outstanding.add(request.id)
            engine.submit(request, load)
            if draw.random() < 0.12:
                with load.news:
                    names = sorted(load.outstanding)
                engine.cancel(draw.choice(names or ["unknown"]))
        time.sleep(draw.expovariate(1 / MEAN_PAUSE_S))
        load.until_fewer(draw.randint(ENGINE_SLOTS, MAX_OUTSTANDING))
    load.until_fewer(1)


def resident_bytes() -> int:
    """Returns the current memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def soak(checkpoint: Checkpoint, requests: int) -> tuple[Load, Stats]:
    """Runs the load and asserts that afterwards the engine uses no more memory, slots and pages
    than before.
    """
    given = kinds(REQUEST_KINDS, checkpoint.config.vocab_size, random.Random(0))
    load = Load(expected=solo_texts(checkpoint, given))
    memory, part = [], -(-requests // MEMORY_READINGS)
    asked = {"slots": ENGINE_SLOTS, "context": MAX_POSITIONS, "page": PAGE, "pages": PAGES}
    with Engine.open(checkpoint, "cpu", **asked) as engine:  # type: ignore[arg-type]
        for first in range(0, requests, part):
            begin, numbers = time.monotonic(), range(first, min(first + part, requests))
            serve(engine, load, given, numbers)
            stats = settled(engine)
            memory.append(resident_bytes())
            rate = len(numbers) / (time.monotonic() - begin)
            print(
                f"{numbers.stop:,} requests: {rate:.0f} a second, {memory[-1] / 2**20:.1f} MiB "
                f"resident, {stats.free_pages} of {stats.pages} pages free, "
                f"{len(load.faults)} faults",
                flush=True,
            )
    assert not load.faults, load.faults[:5]
    assert sum(load.counts[reason.value] for reason in FinishReason) == requests
    assert not load.tokens and not load.finish
    assert stats.preemptions and stats.cached_prompt_tokens
    assert max(memory[2:]) < memory[1] + MAX_GROWTH_BYTES, memory
    return load, stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    args = parser.parse_args()
    load, stats = soak(Checkpoint.open(NOAH), args.requests)
    counts = ", ".join(f"{count:,} {name}" for name, count in load.counts.most_common())
    print(
        f"{counts}; {stats.iterations:,} iterations, {stats.preemptions:,} preemptions, "
        f"{stats.cached_prompt_tokens:,} of {stats.prompt_tokens:,} prompt tokens cached"
    )


if __name__ == "__main__":
    main()
