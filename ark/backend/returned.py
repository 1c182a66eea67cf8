"""Memory that is given back when no kernel runs.

A GPU's driver frees memory once the device is idle, and the kernel of a loop waits for the host: so
whoever lets a tensor go between two runs would wait until that kernel leaves by itself, seconds, or
minutes with several ranks. The devices of both vendors give their memory here instead.
"""

from __future__ import annotations

from collections.abc import Callable

from ark.backend.devices import Memory


class Returned:
    """What waits to be freed. free: the driver's own. busy: whether a kernel runs on the device."""

    def __init__(self, free: Callable[[Memory], None], busy: Callable[[], bool]) -> None:
        self._free = free
        self._busy = busy
        self._waiting: list[Memory] = []

    def add(self, memory: Memory) -> None:
        """Frees it now, with all that waits, or keeps it until a kernel has ended."""
        self._waiting.append(memory)
        self.settle()

    def settle(self) -> None:
        """Frees what waits, unless a kernel runs. Devices ask before they allocate or launch."""
        if self._waiting and not self._busy():
            self.force()

    def force(self) -> bool:
        """Frees what waits, under a kernel too: for an allocation that fails otherwise. False:
        nothing waited.
        """
        found = bool(self._waiting)
        while self._waiting:
            self._free(self._waiting.pop(0))
        return found
