"""Compares the time of a token through the engine, which serves several requests, with that of
plain decoding, in one process on one device.

    python bench/engine_token.py --backend cuda --config llama-3.2-1b --slots 8

Weights are random. The report has times per token: of plain decoding, in launches of 64 tokens and
of one token; and of requests that decode together through the engine, in long launches and in
launches of one iteration. The difference of the last two is the cost of a launch and of the host's
work, which is listed by step. The report also has the host's CPU time per token, and the time from
`submit` to the first token, on an idle engine and while another request decodes.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from ark.backend import registry
from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.cli.measure.decode import _run, _text, fill_caches, random_weights
from ark.ir.dtype import by_name
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.config import builtin_config
from ark.models.plans import plans
from ark.models.sampling import SamplingParams
from ark.plan.types import Plan
from ark.runtime.executor import Executor
from ark.runtime.run import Run
from ark.serving.engine import LAUNCH_ITERATIONS, Engine
from ark.serving.loading import PAGE_POSITIONS, LoadedModel, compiling, pages_of
from ark.serving.rows import DeviceRows, Launched
from ark.serving.scheduler import Scheduler
from ark.serving.types import Event, Request

PLAIN_TOKENS = 64
CHECKED = (7,)  # the prompt after which the two decoders' texts are compared
SKIPPED_TOKENS = 16  # first tokens of a request, skipped while others still join


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def planned(shape: Shape, backend: Backend, device: Device) -> Plan:
    """A plan whose kernels are compiled in the background."""
    begin = time.perf_counter()
    plan = plans(shape, device.machine, drafted=compiling(backend, device))[0]
    print(f"  planned in {time.perf_counter() - begin:.1f} s", flush=True)
    return plan


def loaded(
    plan: Plan, backend: Backend, device: Device, weights: dict[str, np.ndarray]
) -> Executor:
    """Loads a plan with the given weights and random caches. Weights have the same names in the
    plans with and without the engine.
    """
    begin = time.perf_counter()
    executor = Executor(plan, backend, device)
    compiled = time.perf_counter()
    for name, array in weights.items():
        executor.write(name, array)
    fill_caches(executor, plan)
    phases = (
        f"{plan.phases[k.phases[0]].name}: {k.machine.variant.name}, {k.machine.warps} warps"
        for k in executor.kernels
    )
    now = time.perf_counter()
    print(
        f"  {'; '.join(phases)}; compiled and loaded in {compiled - begin:.1f} s, weights written "
        f"in {now - compiled:.1f} s",
        flush=True,
    )
    return executor


def plain(executor: Executor, shape: Shape, position: int) -> tuple[float, list[int]]:
    """Decodes without an engine. Returns the microseconds per token, and the text that follows the
    prompt CHECKED.
    """
    text = _text(position + 1)

    def us_of(tokens: int) -> float:
        return _run(executor, shape, text, tokens)[0] / tokens * 1e6

    us_of(PLAIN_TOKENS)
    many = median([us_of(PLAIN_TOKENS) for _ in range(5)])
    one = median([us_of(1) for _ in range(9)])
    print(
        f"plain decoding from {position} positions on: {many:.1f} us a token of {PLAIN_TOKENS}; a "
        f"launch of one {one:.1f}"
    )
    return many, _run(executor, shape, CHECKED, PLAIN_TOKENS)[1]


class Watched:
    """The events of requests, with their times."""

    def __init__(self) -> None:
        self.times: dict[str, list[tuple[float, int]]] = {}
        self.ended: set[str] = set()
        self.news = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self.news:
            assert not event.error, event.error
            self.times.setdefault(event.id, []).append((time.perf_counter(), len(event.tokens)))
            if event.finish is not None:
                self.ended.add(event.id)
            self.news.notify_all()

    def tokens(self, request_id: str) -> int:
        return sum(count for _, count in self.times.get(request_id, ()))

    def wait(self, request_id: str, tokens: int | None = None) -> None:
        """Waits until a request has ended or has produced `tokens` tokens."""
        with self.news:
            self.news.wait_for(
                lambda: (
                    request_id in self.ended
                    or (tokens is not None and self.tokens(request_id) >= tokens)
                )
            )

    def us_per_token(self, request_id: str, skipped: int) -> float:
        """Wall time per token, without the first tokens."""
        seen, points = 0, []
        for at, count in self.times[request_id]:
            seen += count
            points.append((at, seen))
        steady = [p for p in points if p[1] >= skipped]
        (begin, first), (end, last) = steady[0], steady[-1]
        return (end - begin) / (last - first) * 1e6


@contextmanager
def watched_launches() -> Iterator[list[tuple[int, float]]]:
    """Records the iterations and the device milliseconds of each launch in this block. Launches are
    omitted if the first row produced tokens in only a few of their iterations.
    """
    launches: list[tuple[int, float]] = []
    end = Launched.end

    def watched(self: Launched) -> tuple[int, list[tuple[int, list[int]]]]:
        done, tokens = end(self)
        if len(self._reads) and 2 * self._reads[0] < done:
            launches.append((done, self._run.elapsed_ms()))
        return done, tokens

    Launched.end = watched  # type: ignore[method-assign]
    try:
        yield launches
    finally:
        Launched.end = end  # type: ignore[method-assign]


# The host's steps between two launches, in order: (name, class, method). A step ends when its
# method returns.
STEPS: tuple[tuple[str, type, str], ...] = (
    ("see the end", Run, "wait"),
    ("read", Launched, "end"),
    ("take", Scheduler, "end"),
    ("hear", Engine, "_hear"),
    ("plan", Scheduler, "plan"),
    ("write rows", DeviceRows, "_write_rows"),
    ("clear", Executor, "_reset"),
    ("launch", DeviceRows, "start"),
)


@contextmanager
def watched_steps() -> Iterator[dict[str, list[float]]]:
    """Records the microseconds of each of the host's steps between two launches in this block."""
    times: dict[str, list[float]] = {name: [] for name, *_ in STEPS[1:]}
    last = [0.0]

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            result = method(*given, **named)
            now = time.perf_counter()
            if name in times:
                times[name].append((now - last[0]) * 1e6)
            last[0] = now
            return result

        return call

    kept = [(owner, method, getattr(owner, method)) for _, owner, method in STEPS]
    for (name, owner, method), (*_, own) in zip(STEPS, kept, strict=True):
        setattr(owner, method, watched(name, own))
    try:
        yield times
    finally:
        for owner, method, own in kept:
            setattr(owner, method, own)


class Bench:
    """An engine with a model of random weights, whose requests are timed."""

    def __init__(self, engine: Engine, position: int, tokens: int, plain_us: float) -> None:
        self.engine, self.position, self.tokens, self.plain_us = engine, position, tokens, plain_us
        self.number = 0

    def request(self, prompt: int, tokens: int) -> Request:
        """A request whose prompt differs from those of all other requests, so that no cached prefix
        is reused.
        """
        self.number += 1
        rng = np.random.default_rng(self.number)
        text = tuple(map(int, rng.integers(1, 90, prompt)))
        how = SamplingParams(temperature=0.0, max_tokens=tokens)
        return Request(f"request {self.number}", text, how)

    def rows(self, count: int, iterations: int, tokens: int) -> float:
        """Microseconds per token of each request when the given number of requests decode
        together.
        """
        self.engine._launch_iterations = iterations
        watched = Watched()
        given = [self.request(self.position, tokens) for _ in range(count)]
        with watched_launches() as launches:
            with self.engine._news:  # all arrive together
                for request in given:
                    self.engine.submit(request, watched)
            for request in given:
                watched.wait(request.id, SKIPPED_TOKENS)
            busy, begin = time.process_time(), time.perf_counter()
            for request in given:
                watched.wait(request.id)
            while not self.engine._scheduler.idle:
                time.sleep(1e-3)
            share = (time.process_time() - busy) / (time.perf_counter() - begin)
        each = [watched.us_per_token(request.id, SKIPPED_TOKENS) for request in given]
        us = median(each)
        steady = [(done, ms) for done, ms in launches if done >= min(iterations, 32)]
        on_device = sum(ms for _, ms in steady) / max(1, sum(done for done, _ in steady)) * 1e3
        print(
            f"{count} rows, launches of at most {iterations}: {us:.1f} us a token "
            f"({us / self.plain_us:.3f} of plain), {on_device:.1f} on the device "
            f"({len(launches)} launches); host busy {share:.0%}, {share * us / count:.1f} us a "
            "token",
            flush=True,
        )
        return us

    def steps(self, tokens: int) -> None:
        """Prints the host's steps between launches of one iteration."""
        with watched_steps() as times:
            self.rows(1, 1, tokens)
        medians = {name: median(each[SKIPPED_TOKENS:]) for name, each in times.items()}
        each = ", ".join(f"{name} {us:.0f}" for name, us in medians.items())
        print(f"  host between launches {sum(medians.values()):.0f} us: {each}", flush=True)

    def check(self, wanted: Sequence[int]) -> None:
        """Compares a request's text with that of plain decoding from the same weights."""
        watched, text = Watched(), []

        def listen(event: Event) -> None:
            text.extend(event.tokens)
            watched(event)

        how = SamplingParams(temperature=0.0, max_tokens=len(wanted))
        self.engine.submit(Request("checked", CHECKED, how), listen)
        watched.wait("checked")
        pairs = zip(text, wanted, strict=True)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(text))
        print(f"the first {same} of {len(wanted)} tokens are those of plain decoding", flush=True)

    def first_token(self, beside: int, prompt: int, repeats: int = 9) -> None:
        """The time from submit to the first token while other requests decode."""
        self.engine._launch_iterations = LAUNCH_ITERATIONS
        watched, times = Watched(), []
        others = [self.request(2, self.tokens * 2) for _ in range(beside)]
        for request in others:
            self.engine.submit(request, watched)
        for request in others:
            watched.wait(request.id, 4)
        for repeat in range(repeats):
            request = self.request(prompt, 3)
            time.sleep(0.003 + 0.0007 * repeat)
            begin = time.perf_counter()
            self.engine.submit(request, watched)
            watched.wait(request.id)
            times.append((watched.times[request.id][0][0] - begin) * 1e6)
        gaps = [
            b[0] - a[0]
            for request in others
            for a, b in zip(watched.times[request.id], watched.times[request.id][1:], strict=False)
        ]
        for request in others:
            self.engine.cancel(request.id)
            watched.wait(request.id)
        longest = f"; the others' longest gap {max(gaps) * 1e6:.0f} us" if gaps else ""
        print(
            f"first token of a prompt of {prompt} beside {beside}: {median(times):.0f} us, at most "
            f"{max(times):.0f}{longest}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="")
    parser.add_argument("--config", default="llama-3.2-1b", help="a built-in shape, or a directory")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=0, help="tokens (default: token by token)")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--position", type=int, default=512, help="length of prompts")
    parser.add_argument("--tokens", type=int, default=600, help="new tokens of each request")
    args = parser.parse_args()
    begin = time.perf_counter()
    stored = "/" in args.config
    config = Checkpoint.open(args.config).config if stored else builtin_config(args.config)
    dtype = by_name(args.dtype)
    backend, _ = registry.choose(args.backend)
    with closing(backend.open(0)) as device:
        alone = Shape(config, dtype, args.context, 0)
        shape = Shape(
            config,
            dtype,
            args.context,
            args.chunk,
            batch=args.slots,
            pages=pages_of(args.slots, args.context, PAGE_POSITIONS, None),
        )
        prepared = [planned(each, backend, device) for each in (alone, shape)]
        weights = dict(random_weights(prepared[0], config))
        with loaded(prepared[0], backend, device, weights) as executor:
            plain(executor, alone, args.position)
            middle = args.position + max(0, args.tokens - PLAIN_TOKENS) // 2
            us, text = plain(executor, alone, middle)  # at the positions of the engine's requests
        model = LoadedModel(loaded(prepared[1], backend, device, weights), shape)
        print(f"set up in {time.perf_counter() - begin:.1f} s", flush=True)
        with Engine(model) as engine:
            bench = Bench(engine, args.position, args.tokens, us)
            bench.check(text)
            bench.rows(1, LAUNCH_ITERATIONS, 64)
            one = bench.rows(1, LAUNCH_ITERATIONS, args.tokens)
            short = bench.rows(1, 1, min(args.tokens, 200))
            print(f"a launch more costs {short - one:.1f} us of wall time")
            bench.steps(min(args.tokens, 200))
            for count in (2, 4, 8, 16, 32, 64):
                if count <= args.slots:
                    many = bench.rows(count, LAUNCH_ITERATIONS, args.tokens)
                    print(f"  {count} rows by one: {many / one:.3f}")
            bench.first_token(0, 2)
            if args.slots > 1:
                bench.first_token(1, 2)
                if args.chunk:
                    bench.first_token(1, args.position)
            if args.slots >= 8:
                bench.first_token(7, 2)


if __name__ == "__main__":
    main()
