"""Which message a receive takes, where messages have tags.

Senders tell each message's tag and size, and send their messages in order. One thread takes them as
they are told: each goes to the first receive that waits for its sender, or for anybody, and for its
tag, or is kept until one asks for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

Consume = Callable[[int, Any], None]  # of a message: who sent it, and what


@dataclass
class Message:
    """What was sent, by whom."""

    source: int
    tag: int
    content: Any


@dataclass
class Wanted:
    """A receive that waits; source: None takes anybody's message."""

    source: int | None
    tag: int
    consume: Consume
    made: Future[None] = field(default_factory=Future)

    def fits(self, message: Message) -> bool:
        return self.tag == message.tag and self.source in (None, message.source)


class TagMatcher:
    """next_message: waits for the next message from anybody."""

    def __init__(self, next_message: Callable[[], Message], name: str) -> None:
        self._next = next_message
        self._lock = threading.Lock()
        self._kept: list[Message] = []
        self._waiting: list[Wanted] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=name)

    def receive(self, source: int | None, tag: int, consume: Consume) -> Future[None]:
        """Gives `consume` the first message of that source and tag that no other has got."""
        wanted = Wanted(source, tag, consume)
        with self._lock:
            at = next((i for i, kept in enumerate(self._kept) if wanted.fits(kept)), None)
            if at is None:
                self._waiting.append(wanted)
                self._worker.submit(self._match)  # one for each receive that waits
                return wanted.made
            message = self._kept.pop(at)
        _hand(message, wanted)
        return wanted.made

    def _match(self) -> None:
        """Takes messages until one is for a receive that waits."""
        while True:
            try:
                message = self._next()
            except Exception as error:
                with self._lock:
                    lost, self._waiting = self._waiting, []
                for wanted in lost:
                    wanted.made.set_exception(error)
                return
            with self._lock:
                at = next((i for i, each in enumerate(self._waiting) if each.fits(message)), None)
                if at is None:
                    self._kept.append(message)
                    continue
                wanted = self._waiting.pop(at)
            _hand(message, wanted)
            return

    def close(self) -> None:
        """Waits for the receives under way."""
        self._worker.shutdown(wait=True)


def _hand(message: Message, wanted: Wanted) -> None:
    try:
        wanted.consume(message.source, message.content)
    except Exception as error:
        wanted.made.set_exception(error)
    else:
        wanted.made.set_result(None)
