"""Runs several ranks as threads of one process, with the part of the bootstrap that tests need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Hub:
    """The state that the ranks (threads) of one run share: their barrier and exchanged data."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=300)
        self.slots: list[bytes] = [b""] * world_size
        self.message: str | None = None


class ThreadRanks:
    """Implements the executor's Ranks protocol for one of the threads."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank = hub, rank

    def all_gather(self, data: bytes) -> list[bytes]:
        self.hub.slots[self.rank] = data
        self.barrier()
        actual = list(self.hub.slots)
        self.barrier()
        return actual

    def barrier(self, label: str = "barrier") -> None:
        self.hub.barrier.wait()

    def failure(self) -> str | None:
        return self.hub.message

    def abort(self, message: str) -> None:
        self.hub.message = message


def run_ranks(world_size: int, body: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Runs `body` once per rank, all concurrently. Returns the results by rank; raises the first
    error of any rank.
    """
    hub = Hub(world_size)
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = body(ThreadRanks(hub, rank))
        except BaseException as error:
            errors.append(error)
            hub.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
