"""Copies of a kernel's task table on the device, one for each set of addresses of its external
buffers.

A task table contains addresses. Callers that pass new memory at every call return to the same few
addresses, because allocators reuse freed memory. So recent tables are kept: a call only selects
one, and a launch that still runs keeps its own. Called by the executor.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ark.backend.devices import Memory

MAX_TABLES = 16
MOST_BYTES = 16 << 20  # of all copies; two are always kept
Places = tuple[int, ...]  # addresses of the external buffers, always in the same order


class Placements:
    """first: the initial table, valid for `places`; later ones have the same size. alloc: returns
    memory that the executor frees.
    """

    def __init__(self, places: Places, first: Memory, alloc: Callable[[int], Memory]) -> None:
        self._copies = {places: first}
        self._free: list[Memory] = []
        self._alloc = alloc
        self.replaced = 0  # the number of times that a table was overwritten
        self._nbytes = first.nbytes
        self._most = max(2, min(MAX_TABLES, MOST_BYTES // first.nbytes))

    def find(self, places: Places) -> Memory | None:
        """The table for these addresses."""
        return self._copies.get(places)

    def add(
        self,
        places: Places,
        table: Callable[[int], np.ndarray],
        write: Callable[[int, np.ndarray], None],
        idle: Callable[[], None],
    ) -> Memory:
        """Adds a table. table: its contents for a given address. idle: waits for running launches
        before the oldest table is replaced.
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
        """Makes the table in `memory` the one for these addresses and invalidates all others."""
        self.replaced += 1
        self._free += [m for m in self._copies.values() if m != memory]
        self._copies = {places: memory}
