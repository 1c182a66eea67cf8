"""Stores copies of a kernel's task table on the device, one for each set of addresses of its
external buffers.

A task table is the array of tasks that the kernel reads; it contains addresses. Callers that pass
new memory at every call often use the same few addresses again, because allocators reuse freed
memory. So recent tables are cached. A call selects the table with its addresses, and a launch that
still runs keeps the table that it uses. Called by ark.runtime.device_tables.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ark.backend.devices import Memory

MAX_TABLES = 16
MOST_BYTES = 16 << 20  # limit of all copies; at least two are allowed
Places = tuple[int, ...]  # addresses of the external buffers, in a fixed order


class Placements:
    """The task tables on the device, by the addresses of the external buffers. first: the initial
    table, for the addresses `places`; all tables have the same size. alloc: allocates memory, which
    the executor frees.
    """

    def __init__(self, places: Places, first: Memory, alloc: Callable[[int], Memory]) -> None:
        self._copies = {places: first}
        self._free: list[Memory] = []
        self._alloc = alloc
        self.replaced = 0  # how often a table was overwritten
        self._nbytes = first.nbytes
        self._most = max(2, min(MAX_TABLES, MOST_BYTES // first.nbytes))

    def find(self, places: Places) -> Memory | None:
        """The table for these addresses; None if there is none."""
        return self._copies.get(places)

    def add(
        self,
        places: Places,
        table: Callable[[int], np.ndarray],
        write: Callable[[int, np.ndarray], None],
        idle: Callable[[], None],
    ) -> Memory:
        """Adds a table. table: a function that returns the table's contents for the address at
        which it will be. idle: waits for running launches; called before the oldest table is
        overwritten.
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
        """Records that the table in `memory` is valid for these addresses, and that all other
        tables are invalid.
        """
        self.replaced += 1
        self._free += [m for m in self._copies.values() if m != memory]
        self._copies = {places: memory}
