"""Whose message a receive takes, where messages have no tag and a receive may name nobody.

A message without a tag is told to nobody: its receiver names the sender and waits in memory that
the two share. Once a rank has asked, all others tell it how many messages they have begun to send
to it, now and with each that follows. So who never receives from anybody pays nothing for it.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ark.errors import InvalidUsageError, SystemError
from ark.runtime.bootstrap import Bootstrap

ASK, BEGUN = "messages from anybody", "messages begun"
COUNT = struct.Struct("<Q")


@dataclass
class Waiting:
    """A receive of which it is not known whose message it takes; source: None is anybody's."""

    source: int | None
    begin: Callable[[int], None]


class Arrivals:
    """Receives take messages in the order in which they were called, as far as they fit."""

    def __init__(self, job: Bootstrap) -> None:
        self._job = job
        self._others = [rank for rank in range(job.world_size) if rank != job.rank]
        self._lock = threading.RLock()
        self._asked = False
        self._askers: set[int] = set()
        self._sent: Counter[int] = Counter()
        self._begun: Counter[int] = Counter()  # by that rank, as far as it has told
        self._taken: Counter[int] = Counter()
        self._waiting: list[Waiting] = []
        job.hear(ASK, self._hear_asker)
        job.hear(BEGUN, self._hear_begun)

    def send(self, peer: int) -> None:
        """Called before each message to a peer."""
        with self._lock:
            self._sent[peer] += 1
            if peer in self._askers:
                self._tell(peer)

    def receive(self, source: int | None, begin: Callable[[int], None]) -> None:
        """Has `begin` called with the rank whose next message this receive takes: at once where
        it is named and nobody waits, else perhaps on another thread.
        """
        if source is None and not self._others:
            raise InvalidUsageError("one rank alone receives from nobody; start more")
        with self._lock:
            if source is not None and not self._waiting:
                self._taken[source] += 1
                begin(source)
                return
            self._waiting.append(Waiting(source, begin))
            if not self._asked:
                self._asked = True
                for rank in self._others:
                    self._job.post(rank, ASK, b"")
            self._match()

    def close(self) -> None:
        """Nobody waits any more."""
        with self._lock:
            self._waiting = []

    def _tell(self, peer: int) -> None:
        self._job.post(peer, BEGUN, COUNT.pack(self._sent[peer]))

    def _hear_asker(self, rank: int, said: bytes) -> None:
        with self._lock:
            self._askers.add(rank)
            with contextlib.suppress(SystemError):  # the job has failed: whoever waits learns of it
                self._tell(rank)

    def _hear_begun(self, rank: int, said: bytes) -> None:
        with self._lock:
            self._begun[rank] = max(self._begun[rank], *COUNT.unpack(said))
            self._match()

    def _match(self) -> None:
        """Begins what can begin. A named receive that nobody's stands before needs no telling."""
        still: list[Waiting] = []
        for each in self._waiting:
            left = {rank: self._begun[rank] - self._taken[rank] for rank in self._others}
            source = each.source
            if source is None:
                most = max(self._others, key=left.__getitem__)
                source = most if left[most] > 0 else None
            elif left[source] <= 0 and any(before.source is None for before in still):
                source = None
            if source is None:
                still.append(each)
            else:
                self._taken[source] += 1
                each.begin(source)
        self._waiting = still
