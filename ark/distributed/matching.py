"""Assigns messages with tags to receives of torch.distributed. A sender announces the tag and the
size of each message, and sends its messages in order. One thread takes the messages in the order of
the announcements. A message goes to the first waiting receive that has the message's tag and
accepts its sender. If no receive matches, the message is stored until a matching receive is called.
Called by ark.distributed.messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

Consume = Callable[[int, Any], None]  # receives a message's sender and content


@dataclass
class Message:
    """A message that has arrived, with its sender and tag."""

    source: int
    tag: int
    content: Any


@dataclass
class Wanted:
    """A waiting receive. source: the required sender; None accepts any."""

    source: int | None
    tag: int
    consume: Consume
    done: Future[None] = field(default_factory=Future)

    def fits(self, message: Message) -> bool:
        return self.tag == message.tag and self.source in (None, message.source)


class TagMatcher:
    """Assigns tagged messages to receives. next_message: a function that waits for the next message
    from any sender and returns it.
    """

    def __init__(self, next_message: Callable[[], Message], name: str) -> None:
        self._next = next_message
        self._lock = threading.Lock()
        self._kept: list[Message] = []
        self._waiting: list[Wanted] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=name)

    def receive(self, source: int | None, tag: int, consume: Consume) -> Future[None]:
        """Calls `consume` with the first unassigned message of that tag and source; a source of
        None accepts any sender.
        """
        wanted = Wanted(source, tag, consume)
        with self._lock:
            at = next((i for i, kept in enumerate(self._kept) if wanted.fits(kept)), None)
            if at is None:
                self._waiting.append(wanted)
                self._worker.submit(self._match)  # one message for each waiting receive
                return wanted.done
            message = self._kept.pop(at)
        _hand(message, wanted)
        return wanted.done

    def _match(self) -> None:
        """Takes messages until one matches a waiting receive."""
        while True:
            try:
                message = self._next()
            except Exception as error:
                with self._lock:
                    lost, self._waiting = self._waiting, []
                for wanted in lost:
                    wanted.done.set_exception(error)
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
        """Waits for the receives in progress."""
        self._worker.shutdown(wait=True)


def _hand(message: Message, wanted: Wanted) -> None:
    try:
        wanted.consume(message.source, message.content)
    except Exception as error:
        wanted.done.set_exception(error)
    else:
        wanted.done.set_result(None)
