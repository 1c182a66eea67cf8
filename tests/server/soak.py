"""A soak of `ark serve` on the CPU: a given number of requests, valid ones among those of faulty
clients.

python -m tests.server.soak --requests 100000 --connections 1000

Texts of valid requests must equal those that the same requests had alone. Invalid requests are
refused with a sentence. The server's memory, slots, pages, files and sockets return to their
initial state. Then SIGTERM is sent under load, and finally SIGKILL under load before a start on the
same port.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ark.errors import InvalidUsageError
from ark.models.sampling import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.server.process import Process
from tests.server.raw import request
from tests.server.running import until

HAS_GRAMMARS = importlib.util.find_spec("llguidance") is not None
PROMPT_COUNT = 40
MAX_CLIENTS = 32  # at the same time
MEMORY_READINGS = 10  # in a soak
MAX_GROWTH_BYTES = 64 << 20  # after the second part
CLIENT_S = 600.0
PATIENCE_S = 120.0
OPTIONS = ("--slots", "8", "--queue", "1000", "--max-model-len", "128")


def body(number: int, **fields: Any) -> bytes:
    """Returns the body of a request whose answer depends on the given number only."""
    asked = {"prompt": f"fox {number}", "max_tokens": 12, "temperature": 1.0, "seed": number}
    if number % 4 == 0 and HAS_GRAMMARS:
        asked["structured_outputs"] = {"regex": "[a-z]{3}( [a-z]{2,5}){2}"}
    return json.dumps({**asked, "stream": True, **fields}).encode()


def mutated(draw: random.Random) -> bytes:
    """Returns a body with some bytes changed, removed, added or doubled. Few such bodies
    are valid.
    """
    fields = {"n": 2, "stop": ["a", "b"], "stream": False, "logit_bias": {"5": 1}, "seed": 7}
    text = bytearray(json.dumps({"prompt": "fox", "max_tokens": 4, **fields}).encode())
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(text))
        kind = draw.randrange(4)
        if kind == 0:
            text[place] = draw.randrange(256)
        elif kind == 1:
            del text[place : place + draw.randint(1, 20)]
        elif kind == 2:
            inserted = [b"[" * 5000, b"null", b"-1", b"1e999", b"{}", b'"\\ud800"', b"9" * 30]
            text[place:place] = draw.choice(inserted)
        else:
            text = text[:place] + text
    return bytes(text)


EXTREMES: dict[str, list[Any]] = {
    "temperature": [0, 1e-40, 1e-5, 1e5, 1e38, -1],
    "top_p": [0, 1e-46, 1e-38, 1e-37, 1e-9, 1, 1.1],
    "top_k": [-2, -1, 0, 1, (1 << 31) - 1, 1 << 31],
    "min_p": [-1e-46, 0, 1e-46, 1, 1.1],
    "typical_p": [0, 1e-46, 1e-37, 1e-9, 1],
    "repetition_penalty": [0, 1e-40, 1e-3, 1e3, 1e38],
    "presence_penalty": [-2.1, -2, 2, 1e38],
    "frequency_penalty": [-1e38, -2, 2, 2.1],
    "logit_bias": [{5: 100, 7: -100}, dict.fromkeys(range(300), -100), {5: 1e38}, {5: -1e308}],
    "seed": [-(1 << 63), (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64],
    "logprobs": [0, 20, 21],
}
EXTREME_COUNT = 400


def extreme_fields(number: int) -> dict[str, Any]:
    """Returns a few sampling fields of a request with extreme values, and a seed."""
    draw = random.Random(number)
    names = draw.sample(list(EXTREMES), draw.randint(1, 4))
    return {"seed": number, **{name: draw.choice(EXTREMES[name]) for name in names}}


@dataclass
class Client:
    """One client of the soak: a connection, the number of its request, the expected texts by
    number, and a random source of faults.
    """

    number: int
    expected: dict[int, str]
    draw: random.Random
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def text(self, slowly: bool = False) -> str:
        """Reads a whole stream of events. Returns its text. slowly: pauses after every few
        lines.
        """
        text = ""
        while line := await self.reader.readline():
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                await asyncio.sleep(0.05 if slowly else 0)
            if line.startswith(b"data: [DONE]"):
                return text
        raise AssertionError(f"the stream ends early, after {text!r}")

    async def check(self, *numbers: int, slowly: bool = False) -> None:
        """Asserts that the texts of requests with these numbers (default: this client's) equal the
        texts of earlier requests with the same numbers.
        """
        for number in numbers or (self.number,):
            text = await self.text(slowly)
            assert self.expected.setdefault(number, text) == text, (number, text)

    async def answer(self) -> tuple[int, Any]:
        """Returns the status and the JSON of an answer that is not a stream."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length:")
        )
        return int(head.split()[1]), json.loads(await self.reader.readexactly(length))

    async def refused(self) -> None:
        """Asserts that the answer has status 400 and an error message."""
        status, answer = await self.answer()
        assert status == 400 and is_error(answer), (status, answer)


def is_error(answer: Any) -> bool:
    """True if the answer is OpenAI's error object, with a message of more than 10 characters."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        return False
    return len(error["message"]) > 10 and "Traceback" not in error["message"]


async def good(client: Client) -> None:
    """A client that sends a valid request and reads the whole answer."""
    client.writer.write(request(body(client.number)))
    await client.check()


async def extreme(client: Client) -> None:
    """A client that asks for extreme sampling: refused by a sentence if a field is out of range,
    otherwise always answered by the same text.
    """
    number = client.draw.randrange(EXTREME_COUNT)
    fields = extreme_fields(number)
    client.writer.write(request(body(number, **fields)))
    try:
        SamplingParams(**fields)
    except InvalidUsageError:
        await client.refused()
    else:
        text = await client.text()
        assert client.expected.setdefault(2 * PROMPT_COUNT + number, text) == text, fields


async def long(client: Client) -> None:
    """A client that sends a valid request and reads the whole of a longer answer."""
    client.writer.write(request(body(client.number, max_tokens=100)))
    text = await client.text()
    assert client.expected.setdefault(PROMPT_COUNT + client.number, text) == text


async def cancels(client: Client) -> None:
    """A client that disconnects during the answer."""
    client.writer.write(request(body(client.number, max_tokens=100)))
    await client.reader.readuntil(b"data: ")


async def slow_reader(client: Client) -> None:
    """Reads with pauses."""
    client.writer.write(request(body(client.number)))
    await client.check(slowly=True)


async def half(client: Client) -> None:
    """A client that disconnects before it has sent the whole request."""
    client.writer.write(request(body(client.number))[: 20 + client.number])
    await client.writer.drain()


async def half_closed(client: Client) -> None:
    """A client that closes its sending direction after the request. The server may answer
    or not.
    """
    client.writer.write(request(body(client.number)))
    client.writer.write_eof()
    with contextlib.suppress(ConnectionError):
        while await client.reader.read(1 << 16):
            pass


async def malformed(client: Client) -> None:
    """A client that sends a malformed body."""
    client.writer.write(request(mutated(client.draw)))
    status, answer = await client.answer()
    assert status == 200 or (status == 400 and is_error(answer)), (status, answer)


async def cut_short(client: Client) -> None:
    """A client that sends less of the body than it announced."""
    client.writer.write(request(body(client.number)[: 10 + client.number]))
    await client.refused()


async def no_http(client: Client) -> None:
    """Sends random bytes."""
    client.writer.write(client.draw.randbytes(200) + b"\r\n\r\n")
    await client.refused()


async def invalid_utf8(client: Client) -> None:
    """A client that sends a prompt that is not UTF-8."""
    client.writer.write(request(body(client.number).replace(b"fox", b"f\xffx")))
    await client.refused()


async def ten_megabytes(client: Client) -> None:
    """A client that sends a prompt of 10 MB."""
    client.writer.write(request(json.dumps({"prompt": "fox " * 2_500_000}).encode()))
    await client.writer.drain()
    await client.refused()


async def chunked(client: Client) -> None:
    """A client that sends its body in chunks of one byte."""
    head = request(b"", transfer_encoding="chunked").replace(b"content-length: 0\r\n", b"")
    text = body(client.number)
    client.writer.write(head + b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n")
    await client.check()


async def pipelined(client: Client) -> None:
    """A client that sends a second request before it has read the first answer."""
    other = (client.number + 1) % PROMPT_COUNT
    client.writer.write(request(body(client.number)) + request(body(other)))
    await client.check(client.number, other)


async def half_open(client: Client) -> None:
    """A client that sends half a request and then waits until the server closes the connection."""
    client.writer.write(request(body(client.number))[: 40 + client.number])
    with contextlib.suppress(ConnectionError):
        while await client.reader.read(1 << 16):
            pass


Kind = Callable[[Client], Awaitable[None]]
SHARES: dict[Kind, int] = {
    good: 100,
    extreme: 60,
    cancels: 40,
    slow_reader: 20,
    half: 10,
    half_closed: 10,
    malformed: 20,
    cut_short: 10,
    no_http: 10,
    invalid_utf8: 10,
    chunked: 10,
    pipelined: 10,
    half_open: 4,
    ten_megabytes: 1,
}
"""For each kind of client, how often it is chosen."""


@dataclass
class Load:
    """The load of a server by many clients. expected: the text of each valid request by its
    number.
    """

    port: int
    expected: dict[int, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    async def one(self, kind: Kind, number: int) -> None:
        """Runs one client."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            client = Client(number, self.expected, self.draw, reader, writer)
            await asyncio.wait_for(kind(client), CLIENT_S)
            self.counts[kind.__name__] += 1
        finally:
            writer.close()

    async def alone(self) -> None:
        """Sends each valid request alone and stores its text."""
        for number in range(PROMPT_COUNT):
            await self.one(good, number)
        assert len(set(self.expected.values())) > PROMPT_COUNT / 2

    async def many(self, kinds: Sequence[Kind]) -> None:
        """Runs clients of these kinds, `count` in all, concurrently."""
        gate = asyncio.Semaphore(MAX_CLIENTS)

        async def gated(kind: Kind) -> None:
            async with gate:
                await self.one(kind, self.draw.randrange(PROMPT_COUNT))

        await asyncio.gather(*map(gated, kinds))

    @contextlib.asynccontextmanager
    async def beside_idle(self, count: int) -> AsyncIterator[None]:
        """Keeps idle connections open, and reopens those that are closed."""

        async def idle() -> None:
            while True:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                try:
                    while await reader.read(1 << 16):
                        pass
                finally:
                    writer.close()

        tasks = [asyncio.ensure_future(idle()) for _ in range(count)]
        try:
            yield
            assert not [task for task in tasks if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def soak(server: Process, requests: int, connections: int) -> Load:
    """Runs the load and asserts that afterwards the server uses no more memory, slots, pages, files
    and sockets than before.
    """
    load, files = Load(server.port), server.open_files()
    kinds = load.draw.choices(list(SHARES), list(SHARES.values()), k=requests)

    async def run() -> list[int]:
        await load.alone()
        memory, left_open = [], []
        async with load.beside_idle(connections):
            for part in range(MEMORY_READINGS):
                begin = time.monotonic()
                some = kinds[part::MEMORY_READINGS]
                left_open += [
                    asyncio.ensure_future(load.one(kind, number))
                    for number, kind in enumerate(some)
                    if kind is half_open
                ]
                await load.many([kind for kind in some if kind is not half_open])
                memory.append(server.resident_bytes())
                rate = len(some) / (time.monotonic() - begin)
                print(
                    f"{requests * (part + 1) // MEMORY_READINGS:,} requests: {rate:.0f} a second, "
                    f"{memory[-1] >> 20} MiB resident, {server.open_files()} files open",
                    flush=True,
                )
                assert server.listens_where_asked(), server.listening()
            await asyncio.gather(*left_open)
        return memory

    memory = asyncio.run(run())
    assert max(memory[2:]) < memory[1] + MAX_GROWTH_BYTES, memory
    url = f"{server.url}/stats"
    idle = {"running": 0, "waiting": 0}

    def settled() -> bool:
        now = httpx.get(url, timeout=PATIENCE_S).json()
        return bool(idle.items() <= now.items() and now["free_pages"] == now["pages"])

    until(settled, "all slots and pages are free", PATIENCE_S)
    until(lambda: server.open_files() <= files + 4, "connections are closed", PATIENCE_S)
    return load


def terminate(server: Process, expected: dict[int, str]) -> None:
    """Sends SIGTERM under load: answers that have begun are completed, and the exit code is 0."""
    load = Load(server.port, expected)

    async def run() -> None:
        clients = [asyncio.ensure_future(load.one(long, number)) for number in range(MAX_CLIENTS)]

        def begun() -> int:
            now = httpx.get(f"{server.url}/stats", timeout=PATIENCE_S).json()
            return int(now["running"] + now["waiting"])

        while await asyncio.to_thread(begun) + sum(c.done() for c in clients) < MAX_CLIENTS:
            await asyncio.sleep(0.001)
        assert not all(client.done() for client in clients)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.gather(*clients)

    asyncio.run(run())
    assert server.process.wait(PATIENCE_S) == 0


def kill(server: Process) -> None:
    """Sends SIGKILL under load."""
    load = Load(server.port)

    async def run() -> None:
        clients = [asyncio.ensure_future(load.one(cancels, n)) for n in range(MAX_CLIENTS)]
        await asyncio.wait(clients, return_when=asyncio.FIRST_COMPLETED)
        server.process.kill()
        await asyncio.gather(*clients, return_exceptions=True)

    asyncio.run(run())
    assert server.process.wait(PATIENCE_S) == -signal.SIGKILL


def whole(directory: Path, requests: int, connections: int) -> None:
    """Runs the soak, then ends the server under load by SIGTERM and another by SIGKILL. After each,
    a server starts on the same port.
    """
    begin = time.monotonic()
    with Process(directory, "--port", "0", *OPTIONS) as server:
        load = soak(server, requests, connections)
        terminate(server, load.expected)
    port = str(server.port)
    with Process(directory, "--port", port, *OPTIONS) as server:
        kill(server)
    with Process(directory, "--port", port, *OPTIONS) as server:
        asyncio.run(Load(server.port, load.expected).alone())
    counts = ", ".join(f"{count:,} {name}" for name, count in load.counts.most_common())
    print(f"{sum(load.counts.values()):,} requests ({counts}) beside {connections:,} connections")
    print(
        f"SIGTERM and kill -9 under load and a start after each; {time.monotonic() - begin:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--connections", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = make_checkpoint(Path(folder) / "small", context=128, layers=1)
        whole(directory, args.requests, args.connections)


if __name__ == "__main__":
    main()
