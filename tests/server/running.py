"""A server in the tests' own process, on a thread with its own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ark.models.build import FULL
from ark.models.chat import ChatTemplates
from ark.models.checkpoint import Checkpoint
from ark.models.tokenizer import Tokenizer
from ark.serving.engine import Engine
from ark.serving.http import run
from ark.serving.http.app import Service, application
from ark.serving.http.calls import format_of
from ark.serving.http.model import ServedModel
from ark.serving.http.run import Options, bound, server_of, url_of
from ark.serving.types import EngineLike

PATIENCE_S = 30.0
NOAH = Path(__file__).resolve().parents[2] / "examples/noah"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def noah_model(context: int, template: str | None = TEMPLATE) -> ServedModel:
    """Returns the shipped checkpoint's tokenizer with a chat template added."""
    tokenizer = Tokenizer.open(NOAH, vocab_size=2048)
    chat = ChatTemplates("the test", {"default": template} if template else {}, {})
    ends, calls = frozenset([1]), format_of(chat)
    return ServedModel("noah", tokenizer, chat, context, 2048, ends, call_format=calls)


@dataclass
class Running:
    """A server that accepts requests at `url`."""

    url: str
    port: int
    service: Service
    end: Callable[[], None]


@contextlib.contextmanager
def running(engine: EngineLike, model: ServedModel, options: Options | None = None) -> Iterator:
    """Serves in the background until the block ends."""
    options = options or Options()
    listener = bound("127.0.0.1", 0)
    started: list[Running] = []
    ready = threading.Event()
    failures: list[BaseException] = []

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        service = Service(engine, model, options.limits)
        app = application(service, keys=options.keys, origins=options.origins)
        server = server_of(app, options)
        port = listener.getsockname()[1]
        ended = run.ending(server, service, options.drain_s, loop)

        def end() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(ended)

        started.append(Running(url_of(listener), port, service, end))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.001)
        ready.set()
        await serving

    def work() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(PATIENCE_S)
    if failures:
        raise failures[0]
    try:
        yield started[0]
    finally:
        started[0].end()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server did not end"
        assert not failures, failures


@contextlib.contextmanager
def running_checkpoint(
    directory: Path, options: Options | None = None, name: str = "small"
) -> Iterator[Running]:
    """Serves a checkpoint by this name, on an engine on the CPU."""
    checkpoint = Checkpoint.open(directory)
    config = checkpoint.config
    tokenizer = Tokenizer.open(directory, vocab_size=config.vocab_size)
    templates = ChatTemplates.open(directory, tokenizer.special_tokens)
    ends = frozenset(config.eos_token_ids)
    with Engine.open(checkpoint, "cpu", slots=4, sampling=FULL, max_logprobs=5) as engine:
        model = ServedModel(name, tokenizer, templates, engine.context, config.vocab_size, ends)
        with running(engine, model, options) as started:
            yield started


def until(condition: Callable[[], Any], expectation: str, patience_s: float = PATIENCE_S) -> Any:
    """Waits for a condition, and returns its value."""
    limit = time.monotonic() + patience_s
    while time.monotonic() < limit:
        value = condition()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError(f"not in {patience_s} s: {expectation}")
