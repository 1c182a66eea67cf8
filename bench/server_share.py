"""Measures the share of a CPU core that `ark serve` takes while it streams. The engine is replaced
by one without a model, which produces a given number of tokens per second.

    python bench/server_share.py --streams 64 --rate 2000 --seconds 5 [--profile]

The client is another process. The times are CPU times of two threads, so that other work of the
machine does not count. The engine's thread passes tokens to the server; only this passing is
counted. The server's thread converts tokens to text and JSON and sends them.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import pstats
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ark.models.chat import ChatTemplates
from ark.models.tokenizer import Tokenizer
from ark.serving.http.app import Service, application
from ark.serving.http.model import ServedModel
from ark.serving.http.run import Options, bound, server_of
from ark.serving.types import Event, FinishReason, Request, Stats

NOAH = Path(__file__).resolve().parents[1] / "examples/noah"
CONTEXT_TOKENS = 1 << 16


class PacedEngine:
    """A stand-in for an engine: from `begin` on, it reports a token for each request every `step_s`
    seconds, all at the same time.
    """

    context = CONTEXT_TOKENS

    def __init__(self, slots: int, step_s: float, tokens: list[int]) -> None:
        self._slots, self._step_s, self._tokens = slots, step_s, tokens
        self._open: dict[str, Callable[[Event], None]] = {}
        self.begin = threading.Event()
        self.steps = 0
        self.telling_s = 0.0  # CPU time of passing tokens to the server
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        self._open[request.id] = on_event

    def cancel(self, request_id: str) -> None:
        on_event = self._open.pop(request_id, None)
        if on_event:
            on_event(Event(request_id, finish=FinishReason.CANCELLED))

    def stats(self) -> Stats:
        return Stats(self._slots, len(self._open), 0, 1, 1, 0, 0, 0, 0, 0)

    def close(self, drain: bool = False) -> None: ...

    def _run(self) -> None:
        self.begin.wait()
        due = time.monotonic()
        while True:
            due += self._step_s
            time.sleep(max(0.0, due - time.monotonic()))
            token = (self._tokens[self.steps % len(self._tokens)],)
            self.steps += 1
            before = time.thread_time()
            for name, on_event in list(self._open.items()):
                on_event(Event(name, token))
            self.telling_s += time.thread_time() - before


def read(port: int, streams: int, ready: multiprocessing.Event) -> None:
    """The client: reads `streams` streams and discards them."""
    body = json.dumps(
        {"prompt": "The king", "max_tokens": CONTEXT_TOKENS // 2, "stream": True}
    ).encode()
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    async def one(connected: asyncio.Semaphore) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: ark\r\n" + head + body)
        connected.release()
        while await reader.read(1 << 16):
            pass

    async def all_of_them() -> None:
        connected = asyncio.Semaphore(0)
        tasks = [asyncio.ensure_future(one(connected)) for _ in range(streams)]
        for _ in tasks:
            await connected.acquire()
        ready.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(all_of_them())


async def measure(
    listener: socket.socket, streams: int, rate: float, seconds: float, profile: bool
) -> None:
    """Runs the server and prints the CPU time of its thread."""
    tokenizer = Tokenizer.open(NOAH, vocab_size=2048)
    text = "The king said to his servants, go out and bring me what you have found. " * 20
    engine = PacedEngine(streams, streams / rate, tokenizer.encode(text, framed=False))
    model = ServedModel(
        "noah", tokenizer, ChatTemplates("", {}, {}), CONTEXT_TOKENS, 2048, frozenset([1])
    )
    options = Options(drain_s=0.1)
    service = Service(engine, model, options.limits)
    server = server_of(application(service), options)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    ready = multiprocessing.Event()
    port = listener.getsockname()[1]
    client = multiprocessing.Process(target=read, args=(port, streams, ready))
    client.start()
    while engine.stats().running < streams or not ready.is_set():
        await asyncio.sleep(0.05)
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    engine.begin.set()
    first, telling, cpu, wall = engine.steps, engine.telling_s, time.thread_time(), time.monotonic()
    await asyncio.sleep(seconds)
    cpu, wall = time.thread_time() - cpu, time.monotonic() - wall
    tokens, telling = (engine.steps - first) * streams, engine.telling_s - telling
    profiler.disable()
    print(
        f"{tokens / wall:,.0f} tokens/s in {streams} streams: {1e6 * cpu / tokens:.0f} us a token"
    )
    print(f"share of a core at {rate:,.0f} tokens/s: {100 * cpu / tokens * rate:.0f}%")
    step_us = 1e6 * streams / rate
    telling_us = 1e6 * telling / (tokens / streams)
    print(
        f"engine's thread: {telling_us:.1f} us an iteration to give its tokens to the server, "
        f"{100 * telling_us / step_us:.1f}% of the iteration's {step_us:,.0f} us"
    )
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    client.kill()
    server.should_exit = server.force_exit = True
    service.abort()
    await serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2000.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    with bound("127.0.0.1", 0) as listener:
        asyncio.run(measure(listener, args.streams, args.rate, args.seconds, args.profile))


if __name__ == "__main__":
    main()
