"""Threads on which a CPU's launches run: kept for a while, one a launch, none in a forked child."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator

import pytest
from ark_cpu import workers


@pytest.fixture(autouse=True)
def none_idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(workers, "_idle", [])
    yield


def run() -> int:
    """The thread on which something ran."""
    said: queue.SimpleQueue[int] = queue.SimpleQueue()
    ended = threading.Event()
    workers.run(lambda: said.put(threading.get_native_id()), ended.set)
    assert ended.wait(10)
    return said.get(timeout=10)


def test_the_next_launch_has_the_same_thread() -> None:
    """Also at once: whoever hears of an end finds the thread that was told to be free."""
    assert len({run() for _ in range(200)}) == 1


def test_launches_at_one_time_have_threads_of_their_own() -> None:
    both, ended = threading.Barrier(2, timeout=10), queue.SimpleQueue[bool]()
    for _ in range(2):
        workers.run(lambda: both.wait(), lambda: ended.put(True))  # meets the other one
    assert ended.get(timeout=10) and ended.get(timeout=10)
    assert not both.broken


def test_a_thread_with_nothing_to_do_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "IDLE_S", 0.01)
    number = run()
    end = time.monotonic() + 20
    while any(t.native_id == number for t in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert run() > 0  # on another thread


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    run()
    child = os.fork()
    if child == 0:
        os._exit(0 if run() > 0 else 1)
    end = time.monotonic() + 30
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            os.kill(child, 9)
        time.sleep(0.02)
    assert status == 0
