"""Frees memory only while no kernel runs.

A GPU's driver waits for an idle device before it frees memory, and a persistent loop kernel waits
for the host: a tensor that is dropped between two runs would block the host until that kernel
leaves by itself, which takes seconds, or minutes with several ranks. Devices of GPU vendors return
their memory through this module instead.
"""

from __future__ import annotations

from collections.abc import Callable

from ark.backend.devices import Memory


class Returned:
    """Memory waiting to be freed. free: the driver's function. busy: True while a kernel runs on
    the device.
    """

    def __init__(self, free: Callable[[Memory], None], busy: Callable[[], bool]) -> None:
        self._free = free
        self._busy = busy
        self._waiting: list[Memory] = []

    def add(self, memory: Memory) -> None:
        """Frees the memory, together with all that waits, if no kernel runs; otherwise keeps it
        until then.
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
        """Frees the waiting memory even while a kernel runs, for an allocation that would fail
        otherwise. Returns False if none waited.
        """
        any_waited = bool(self._waiting)
        while self._waiting:
            self._free(self._waiting.pop(0))
        return any_waited
