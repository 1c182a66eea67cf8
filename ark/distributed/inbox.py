"""Which of a peer's messages a receive takes, where messages have tags.

The sender tells each message's tag and size, and sends the messages in their order. One thread for
each sender takes them in that order: each goes to the first receive that waits for its tag, or is
kept until one asks for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Take = Callable[[Any], None]


class Inbox:
    """next_message: waits for the peer's next message; returns its tag and what was sent."""

    def __init__(self, next_message: Callable[[], tuple[int, Any]], name: str) -> None:
        self._next = next_message
        self._lock = threading.Lock()
        self._kept: dict[int, deque[Any]] = {}
        self._waiting: dict[int, deque[tuple[Take, Future[None]]]] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=name)

    def receive(self, tag: int, take: Take) -> Future[None]:
        """Gives `take` the first message of that tag that no receive before has got."""
        made: Future[None] = Future()
        with self._lock:
            if tag not in self._kept:
                self._waiting.setdefault(tag, deque()).append((take, made))
                self._worker.submit(self._bring)  # one for each receive that waits
                return made
            message = _first(self._kept, tag)
        _hand(message, take, made)
        return made

    def _bring(self) -> None:
        """Takes messages until one is for a receive that waits."""
        while True:
            try:
                tag, message = self._next()
            except Exception as error:
                with self._lock:
                    lost = [made for line in self._waiting.values() for _, made in line]
                    self._waiting.clear()
                for made in lost:
                    made.set_exception(error)
                return
            with self._lock:
                if tag not in self._waiting:
                    self._kept.setdefault(tag, deque()).append(message)
                    continue
                take, made = _first(self._waiting, tag)
            _hand(message, take, made)
            return

    def close(self) -> None:
        """Waits for the receives under way."""
        self._worker.shutdown(wait=True)


def _first(lines: dict[int, deque[Any]], tag: int) -> Any:
    first = lines[tag].popleft()
    if not lines[tag]:
        del lines[tag]
    return first


def _hand(message: Any, take: Take, made: Future[None]) -> None:
    try:
        take(message)
    except Exception as error:
        made.set_exception(error)
    else:
        made.set_result(None)
