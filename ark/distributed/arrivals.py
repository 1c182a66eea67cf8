"""Determines the sender of each receive in torch.distributed, where a receive may accept messages
from any sender.

A receive that names its sender waits for data in memory that both ranks share. A receive that
accepts any sender must first learn which rank sends. Therefore, when a rank first calls such a
receive, it asks all other ranks to report how many messages they have begun to send to it. Each
reports the number at once, and again with each later message. A rank that always names the sender
has no overhead. Messages with a tag are handled elsewhere (ark.distributed.matching). Called by
ark.distributed.messages.
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

ASK, BEGUN = "messages from any rank", "messages begun"
COUNT = struct.Struct("<Q")


@dataclass
class Waiting:
    """A receive whose sender is not determined yet. source: the required sender; None accepts any.
    begin: the function to call with the sender's rank.
    """

    source: int | None
    begin: Callable[[int], None]


class Arrivals:
    """Determines the sender of each receive. Receives get messages in the order in which the
    receives were called. A receive that names a sender gets only messages of this sender.
    """

    def __init__(self, job: Bootstrap) -> None:
        self._job = job
        self._others = [rank for rank in range(job.world_size) if rank != job.rank]
        self._lock = threading.RLock()
        self._asked = False
        self._askers: set[int] = set()
        self._sent: Counter[int] = Counter()
        self._begun: Counter[int] = Counter()  # by sender: how many messages it has begun to send
        self._taken: Counter[int] = Counter()
        self._waiting: list[Waiting] = []
        job.hear(ASK, self._hear_asker)
        job.hear(BEGUN, self._hear_begun)

    def send(self, peer: int) -> None:
        """Counts a message to `peer`, before the message is sent. If the peer has asked for
        reports, sends it the new count.
        """
        with self._lock:
            self._sent[peer] += 1
            if peer in self._askers:
                self._tell(peer)

    def receive(self, source: int | None, begin: Callable[[int], None]) -> None:
        """Registers a receive. `begin` is called with the rank of the sender whose next message
        this receive gets. If `source` names the sender and no earlier receive waits, `begin` is
        called immediately; otherwise possibly later, on another thread.
        """
        if source is None and not self._others:
            raise InvalidUsageError(
                "a job of one rank has no rank to receive from; start more ranks"
            )
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
        """Drops all waiting receives."""
        with self._lock:
            self._waiting = []

    def _tell(self, peer: int) -> None:
        self._job.post(peer, BEGUN, COUNT.pack(self._sent[peer]))

    def _hear_asker(self, rank: int, body: bytes) -> None:
        with self._lock:
            self._askers.add(rank)
            with contextlib.suppress(
                SystemError
            ):  # the job has failed, and each waiting receive reports the failure
                self._tell(rank)

    def _hear_begun(self, rank: int, body: bytes) -> None:
        with self._lock:
            self._begun[rank] = max(self._begun[rank], *COUNT.unpack(body))
            self._match()

    def _match(self) -> None:
        """Begins the waiting receives whose sender is now known. A receive that names its sender
        can begin without a report from the sender, unless an earlier receive that accepts any
        sender still waits.
        """
        remaining: list[Waiting] = []
        for each in self._waiting:
            left = {rank: self._begun[rank] - self._taken[rank] for rank in self._others}
            source = each.source
            if source is None:
                most = max(self._others, key=left.__getitem__)
                source = most if left[most] > 0 else None
            elif left[source] <= 0 and any(before.source is None for before in remaining):
                source = None
            if source is None:
                remaining.append(each)
            else:
                self._taken[source] += 1
                each.begin(source)
        self._waiting = remaining
