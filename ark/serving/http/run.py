"""Runs the server until a signal ends it: opens the socket, handles signals, and lets running
requests finish. Called by `ark serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette

from ark.errors import GpuError, InvalidUsageError, SystemError
from ark.serving.http.app import Limits, Service, application
from ark.serving.http.connection import Connection
from ark.serving.http.model import ServedModel
from ark.serving.types import EngineLike

KEEP_ALIVE_S = 30
LAST_WORDS_S = 2  # the time in which the last errors can reach clients


@dataclass(frozen=True)
class Options:
    """keys, origins: see ark.serving.http.app.application. drain_s: the most seconds for which
    answers may continue after SIGTERM.
    """

    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    drain_s: float = 30.0
    limits: Limits = field(default_factory=Limits)


def bound(host: str, port: int) -> socket.socket:
    """A socket bound to that address, which does not listen yet. Raises SystemError if the address
    cannot be used.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InvalidUsageError(
            f"--host {host}: not an address of this machine ({error})"
        ) from None
    family, kind, protocol, _, address = addresses[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise SystemError(
            f"{host}:{port} cannot be used: {error.strerror}; give another --port or --host"
        ) from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL of the address that the server listens on."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """A uvicorn server that does not handle signals, because its caller does."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no signal handlers."""
        yield


def server_of(app: Starlette, options: Options) -> uvicorn.Server:
    """The server that runs an application."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # clients receive errors as JSON
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(options.drain_s + LAST_WORDS_S)),
    )
    return _Server(config)


def ending(
    server: uvicorn.Server, service: Service, drain_s: float, loop: asyncio.AbstractEventLoop
) -> Callable[[], None]:
    """Returns a function that ends a server. From its first call on, new requests are refused.
    After drain_s seconds, or at the second call, answers that are still running end with an error.
    If the engine fails, the server ends after its clients have received the error.
    """

    def failed() -> None:
        server.config.timeout_graceful_shutdown = LAST_WORDS_S
        server.should_exit = True

    service.on_failure = failed

    def end() -> None:
        if server.should_exit:
            service.abort()
            return
        service.draining = True
        server.should_exit = True
        loop.call_later(drain_s, service.abort)

    return end


async def serve(
    engine: EngineLike,
    model: ServedModel,
    options: Options,
    listener: socket.socket,
    ready: Callable[[], None],
) -> None:
    """Serves until SIGTERM or SIGINT. Then running requests may continue for at most drain_s; a
    second signal ends them at once. ready: called when the server accepts requests. The engine
    stays open. Raises GpuError if the engine fails.
    """
    service = Service(engine, model, options.limits)
    app = application(service, keys=options.keys, origins=options.origins)
    server = server_of(app, options)
    loop = asyncio.get_running_loop()
    end = ending(server, service, options.drain_s, loop)
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, end)
    try:
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started and not running.done():
            await asyncio.sleep(0.005)
        if not running.done():
            ready()
        await running
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
    if service.failure:
        raise GpuError(f"{service.failure}; the server has ended, start it again")
