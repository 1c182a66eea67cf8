"""Good requests among bad ones for a long while: texts stay right, and nothing is left behind.

ARK_SOAK_REQUESTS and ARK_SOAK_CONNECTIONS make it longer: 100,000 and 1,000 for a release.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ark.models.build import FULL
from ark.models.chat import ChatTemplates
from ark.models.tokenizer import Tokenizer
from ark.server.app import Limits
from ark.server.model import ServedModel
from ark.server.run import Options
from ark.serving.engine import Engine
from tests.checkpoints import make_checkpoint
from tests.server.raw import request
from tests.server.running import Running, running, until
from tests.slow import slow

SOAK_REQUESTS = int(os.environ.get("ARK_SOAK_REQUESTS", 3000))
IDLE_CONNECTIONS = int(os.environ.get("ARK_SOAK_CONNECTIONS", 300))
FORMED = importlib.util.find_spec("llguidance") is not None
PROMPT_COUNT = 40


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    directory = make_checkpoint(tmp_path / "served", context=128, layers=1)
    tokenizer = Tokenizer.open(directory, vocab_size=320)
    with Engine.open(directory, "cpu", slots=8, sampling=FULL) as engine:
        templates = ChatTemplates("the test", {}, {})
        model = ServedModel("small", tokenizer, templates, 128, 320, frozenset([1]))
        with running(engine, model, Options(limits=Limits(queue=1000))) as started:
            yield started


def body(number: int) -> bytes:
    """A request whose answer depends on its number alone."""
    asked = {"prompt": f"fox {number}", "max_tokens": 12, "temperature": 1.0, "seed": number}
    if number % 4 == 0 and FORMED:
        asked["structured_outputs"] = {"regex": "[a-z]{3}( [a-z]{2,5}){2}"}
    return json.dumps({**asked, "stream": True}).encode()


async def text_of(reader: asyncio.StreamReader) -> str:
    """The text of a stream of events."""
    text = ""
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            text += event["choices"][0]["text"]
        if line.startswith(b"data: [DONE]"):
            return text
    raise AssertionError("the stream ends early")


async def client(port: int, number: int, kind: str, expected: dict[int, str]) -> None:
    """One connection of a kind."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if kind == "good":
            writer.write(request(body(number)))
            text = await text_of(reader)
            assert expected.setdefault(number, text) == text
        elif kind == "leaves":
            writer.write(request(body(number)))
            await reader.readline()
        elif kind == "half":
            writer.write(request(body(number))[: 20 + number])
        elif kind == "slow":
            writer.write(request(body(number)))
            await asyncio.sleep(0.3)
            assert expected[number] == await text_of(reader)
        elif kind == "malformed":
            writer.write(request(body(number)[: 10 + number]))
            assert b" 400 " in await reader.readline()
        elif kind == "bytes":
            writer.write(random.Random(number).randbytes(200) + b"\r\n\r\n")
            assert b" 400 " in await reader.readline()
        elif kind == "long":
            writer.write(request(json.dumps({"prompt": "fox " * 2_500_000}).encode()))
            await writer.drain()
            assert b" 400 " in await reader.readline()
        elif kind == "utf8":
            writer.write(request(body(number).replace(b"fox", b"f\xffx")))
            assert b" 400 " in await reader.readline()
        elif kind == "half-closed":
            writer.write(request(body(number)))
            writer.write_eof()
            while await reader.readline():
                pass
        elif kind == "chunked":
            head = request(b"", transfer_encoding="chunked").replace(b"content-length: 0\r\n", b"")
            text = body(number)
            writer.write(head + b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n")
            assert expected[number] == await text_of(reader)
        elif kind == "pipelined":
            other = (number + 1) % PROMPT_COUNT
            writer.write(request(body(number)) + request(body(other)))
            assert [expected[n] for n in (number, other)] == [
                await text_of(reader),
                await text_of(reader),
            ]
    finally:
        writer.close()


async def soak(port: int, requests: int, expected: dict[int, str]) -> None:
    draw = random.Random(0)
    kinds = ["good"] * 10 + ["leaves"] * 4 + ["half", "slow", "malformed", "bytes"] * 2
    kinds += ["utf8", "half-closed", "chunked", "pipelined"]
    gate = asyncio.Semaphore(32)

    async def one(place: int) -> None:
        async with gate:
            kind = "long" if place % 200 == 0 else draw.choice(kinds)
            number = draw.randrange(PROMPT_COUNT)
            await asyncio.wait_for(client(port, number, kind, expected), 120)

    await asyncio.gather(*[one(place) for place in range(requests)])


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@slow
@pytest.mark.timeout(1500 + SOAK_REQUESTS // 2)
def test_soak(server: Running) -> None:
    expected: dict[int, str] = {}

    async def alone() -> None:
        for number in range(PROMPT_COUNT):
            await client(server.port, number, "good", expected)

    asyncio.run(alone())
    assert len(set(expected.values())) > PROMPT_COUNT / 2
    begin = time.monotonic()
    asyncio.run(soak(server.port, SOAK_REQUESTS // 3, expected))
    before = resident_bytes(), len(os.listdir("/proc/self/fd"))

    async def beside_idle() -> None:
        """The same while many connections are open and say nothing."""
        idle = [
            await asyncio.open_connection("127.0.0.1", server.port) for _ in range(IDLE_CONNECTIONS)
        ]
        await soak(server.port, SOAK_REQUESTS * 2 // 3, expected)
        for _, writer in idle:
            writer.close()

    asyncio.run(beside_idle())
    engine = server.service.engine
    until(lambda: engine.stats().running + engine.stats().waiting == 0, "all slots are free")
    until(lambda: engine.stats().free_pages == engine.stats().pages, "all pages are free")
    assert not server.service.dispatcher.jobs
    files = "/proc/self/fd"
    until(lambda: len(os.listdir(files)) <= before[1] + 8, "connections are closed")
    after = resident_bytes()
    print(
        f"{SOAK_REQUESTS:,} requests in {time.monotonic() - begin:.0f} s; resident memory "
        f"{before[0] >> 20} MiB after a third, {after >> 20} MiB at the end"
    )
    assert after < before[0] + (64 << 20)
