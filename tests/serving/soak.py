"""A soak of the engine on the CPU, without HTTP: requests arrive at random over 24 slots and few
pages, and a tenth of them is cancelled in any state.

python -m tests.serving.soak --requests 100000

Every text must equal that of the same request served alone, up to a token whose score is within
MAX_TIED_SCORES of the best one's: prompts of other lengths round differently. A cancelled text must
be a prefix of it. Every request ends exactly once. Memory, slots and pages return to their initial
state.
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

import torch
from transformers import LlamaForCausalLM

from ark.models.checkpoint import Checkpoint
from ark.models.sampling import SamplingParams
from ark.ops.tokens import _scores
from ark.serving.engine import Engine
from ark.serving.types import Event, FinishReason, Request, Stats
from ark.tasks.tokens import noise_key
from tests.serving.requests import MAX_POSITIONS, WAIT_S, Listener, settled, solo_texts

NOAH = Path(__file__).resolve().parents[2] / "examples/noah"
ENGINE_SLOTS = 24
MAX_OUTSTANDING = 3 * ENGINE_SLOTS  # requests that wait or run
PAGE, PAGES = 8, 44
REQUEST_KINDS = 200  # different requests
MEMORY_READINGS = 10  # in a soak
MAX_GROWTH_BYTES = 16 << 20  # after the second part
MAX_TIED_SCORES = 0.05  # difference of two scores that rounding to bf16 can change
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
    text of each kind of request. others: for each other text, its kind and its tokens.
    """

    expected: dict[str, list[int]] = field(default_factory=dict)
    outstanding: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    others: list[tuple[str, list[int]]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if event.finish is None:
            return
        with self.news:
            self.outstanding.remove(event.id)
            tokens = self.tokens.pop(event.id)
            del self.finish[event.id], self.errors[event.id]
            kind = event.id.partition("/")[2]
            wanted = self.expected[kind]
            if event.finish is FinishReason.CANCELLED:
                wanted = wanted[: len(tokens)]
            if event.finish is FinishReason.ERROR:
                self.faults.append(f"{event}: {tokens} in place of {wanted}")
            elif tokens != wanted:
                self.others.append((kind, tokens))
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


def score_difference(
    checkpoint: Checkpoint, request: Request, tokens: list[int], wanted: list[int]
) -> float:
    """The difference of the scores of two texts at the first token that differs. A score is the
    logit, or with a temperature what sampling compares. transformers computes the logits in fp32.
    """
    model = LlamaForCausalLM.from_pretrained(checkpoint.directory, dtype=torch.float32)
    same = next(
        (n for n, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b),
        min(len(tokens), len(wanted)) - 1,
    )
    read = [*request.prompt, *wanted[:same]]
    with torch.no_grad():
        logits = model(torch.tensor([read])).logits[0, -1].numpy()
    how = request.sampling
    key = noise_key(how.seed or 0, 0)
    scores = _scores(logits, how.temperature, 0, key, len(read) - 1)
    return float(abs(scores[tokens[same]] - scores[wanted[same]]))


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
                f"{len(load.faults)} faults, {len(load.others)} other texts",
                flush=True,
            )
    assert not load.faults, load.faults[:5]
    named = {request.id: request for request in given}
    for kind, tokens in load.others:
        wanted = load.expected[kind]
        apart = score_difference(checkpoint, named[kind], tokens, wanted)
        print(f"{kind}: {tokens} in place of {wanted}, scores {apart:.4f} apart", flush=True)
        assert apart < MAX_TIED_SCORES, kind
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
