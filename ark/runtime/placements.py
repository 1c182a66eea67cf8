"""Copies of a kernel's task table on the device, one for each set of addresses that its external
buffers have had.

A table holds addresses. Callers who give new memory at every call come back to the same few, as
allocators hand freed memory out again; so the last tables stay, a call only says which one holds,
and a launch that still runs keeps its own. Called by the executor.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ark.backend.devices import Memory

MOST = 16
MOST_BYTES = 16 << 20  # of all copies, but two are always kept
Places = tuple[int, ...]  # addresses of the external buffers, always in the same order


class Placements:
    """first: the table that there is, at `places`; others take as much memory. alloc: gives memory
    that the executor frees.
    """

    def __init__(self, places: Places, first: Memory, alloc: Callable[[int], Memory]) -> None:
        self._copies = {places: first}
        self._free: list[Memory] = []
        self._alloc = alloc
        self.replaced = 0  # how often a table was overwritten
        self._nbytes = first.nbytes
        self._most = max(2, min(MOST, MOST_BYTES // first.nbytes))

    def find(self, places: Places) -> Memory | None:
        """The table of these addresses."""
        return self._copies.get(places)

    def add(
        self,
        places: Places,
        table: Callable[[int], np.ndarray],
        write: Callable[[int, np.ndarray], None],
        idle: Callable[[], None],
    ) -> Memory:
        """Writes another table. table: what is to lie at an address. idle: waits for what runs,
        before the oldest one is replaced.
        """
        if self._free:
            memory = self._free.pop()
        elif len(self._copies) < self._most:
            memory = self._alloc(self._nbytes)
        else:
            idle()
            self.replaced += 1
            memory = self._copies.pop(next(iter(self._copies)))
        write(memory.address, table(memory.address))
        self._copies[places] = memory
        return memory

    def only(self, places: Places, memory: Memory) -> None:
        """The table in `memory` is the one of these addresses, and no other holds any more."""
        self.replaced += 1
        self._free += [m for m in self._copies.values() if m != memory]
        self._copies = {places: memory}
