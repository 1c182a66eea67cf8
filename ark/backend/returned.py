"""Delays the freeing of device memory until no kernel runs.

A GPU's driver waits for an idle device before it frees memory, but a persistent loop kernel stays
on the device and waits for the host. So a tensor that is dropped between two runs would block the
host until that kernel leaves by its time limit, after seconds, or minutes with several ranks.
Devices of GPU vendors free their memory through this module instead.
"""

from __future__ import annotations

from collections.abc import Callable

from ark.backend.devices import Memory


class Returned:
    """A list of memory that waits to be freed. free: the driver's function. busy: returns True
    while a kernel runs on the device.
    """

    def __init__(self, free: Callable[[Memory], None], busy: Callable[[], bool]) -> None:
        self._free = free
        self._busy = busy
        self._waiting: list[Memory] = []

    def add(self, memory: Memory) -> None:
        """Frees this memory and all waiting memory if no kernel runs; otherwise adds it to the
        waiting memory.
        """
        self._waiting.append(memory)
        self.settle()

    def settle(self) -> None:
        """Frees the waiting memory unless a kernel runs. Devices call it before they allocate or
        launch.
        """
        if self._waiting and not self._busy():
            self.force()

    def force(self) -> bool:
        """Frees the waiting memory even while a kernel runs, if an allocation would otherwise fail.
        Returns False if no memory was waiting.
        """
        any_waited = bool(self._waiting)
        while self._waiting:
            self._free(self._waiting.pop(0))
        return any_waited
