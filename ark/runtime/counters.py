"""Allocates the counters of one rank's plan in device memory. Tasks wait for counters and signal
them. Called by ark.runtime.loaded.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ark.backend.codegen.constants import signal_words
from ark.backend.devices import Device, Memory
from ark.machine import Machine
from ark.plan.types import Plan, PlanCounter


def counter_bytes(plan: Plan, machine: Machine) -> int:
    """Bytes of all counters; each has a cache line of its own."""
    return len(plan.counters) * machine.line_bytes


class Counters:
    """The counters of a plan. Counters that peers signal are in uncached memory that peers can
    address. If there are several ranks, the other counters are in separate, cached memory.
    """

    def __init__(
        self,
        plan: Plan,
        machine: Machine,
        device: Device,
        shared: int,
        alloc: Callable[[int], Memory],
    ) -> None:
        """shared: the address of `counter_bytes` bytes of memory that peers can address. alloc: a
        function that allocates a number of bytes.
        """
        self._plan, self._machine, self._device = plan, machine, device
        self._nbytes = counter_bytes(plan, machine)
        self._shared = shared
        self._apart = alloc(self._nbytes).address if plan.world_size > 1 else shared

    def address(self, counter: PlanCounter) -> int:
        """The address of a counter of this rank."""
        first = self._shared if counter.system else self._apart
        return first + counter.id * self._machine.line_bytes

    def own(self, counter: int) -> int:
        """The address of the word in which this rank counts the signals that it has sent to a
        peer's counter. Used on machines whose links support stores but no atomic additions.
        """
        return self._apart + counter * self._machine.line_bytes

    def ranges(self) -> list[tuple[int, int]]:
        """Returns (address, bytes) of all memory that holds counters."""
        return [(address, self._nbytes) for address in sorted({self._shared, self._apart})]

    def values(self) -> list[int]:
        """The values of all counters of this rank, by id."""
        stride = self._machine.line_bytes // 4
        lines = {
            address: self._device.read(address, nbytes).view(np.uint32).reshape(-1, stride)
            for address, nbytes in self.ranges()
        }
        shared, apart = lines[self._shared], lines[self._apart]
        words = signal_words(self._plan, self._machine)
        return [
            int((shared[c.id, :words] if c.system else apart[c.id, :1]).sum(dtype=np.uint32))
            for c in self._plan.counters
        ]
