"""The error when the system cannot start a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from ark.backend import threads
from ark.errors import SystemError
from ark.runtime import rendezvous


@pytest.fixture
def no_room() -> Iterator[None]:
    """Sets a thread stack size that no address space can hold, so that no thread can be started."""
    before = threading.stack_size(1 << 46)
    yield
    threading.stack_size(before)


def test_thread_that_the_system_refuses(no_room: None) -> None:
    with pytest.raises(SystemError, match="refused to start a thread"):
        threads.start(print, "never")


def test_server_without_threads_goes_on() -> None:
    """If no thread can be started for a client, the server rejects the client and continues; the
    client may connect again later.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    server = rendezvous.Server(listener, 1, "a job", 5.0)
    before = threading.stack_size(1 << 46)
    try:
        with socket.create_connection(listener.getsockname(), 10) as early:
            assert early.recv(1) == b""
    finally:
        threading.stack_size(before)
    with socket.create_connection(listener.getsockname(), 10) as later:
        assert later.recv(1) != b""  # the server's nonce
    server.close(0.0)


def test_thread_runs() -> None:
    seen: list[int] = []
    threads.start(seen.append, 3).join(10)
    assert seen == [3]
