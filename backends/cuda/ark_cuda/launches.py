"""Launches of loop kernels on an NVIDIA GPU, each between two events of a stream. Called by
device.py and repeated_launch.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ark.backend.devices import Grid
from ark_cuda.driver import check, cu, current


@dataclass(frozen=True)
class Program:
    """A loaded loop kernel. registers: those of a thread. shared_bytes: static shared memory of a
    block.
    """

    module: Any
    function: Any
    registers: int
    shared_bytes: int


class Events:
    """The reusable events of a device's launches. label: the device's name, for errors."""

    def __init__(self, context: Any, label: str) -> None:
        self.context = context
        self.label = label
        self._events: dict[int, Any] = {}
        self._free: list[Any] = []  # events of launches that were dropped

    def take(self, doing: str) -> Any:
        """Returns an event for a launch, which gives it back by `release`."""
        if self._free:
            return self._free.pop()
        with current(self.context):
            event = check(cu.cuEventCreate(0), doing)
        self._events[int(event)] = event
        return event

    def release(self, *events: Any) -> None:
        """Makes a launch's two events available to later launches. The launch may still be running,
        but its events are not waited for any more.
        """
        if self.context is not None:
            self._free += events

    def close(self) -> None:
        """Destroys all events. Events that are released later are ignored."""
        for event in self._events.values():
            cu.cuEventDestroy(event)
        self._events.clear()
        self._free.clear()
        self.context = None


class CudaLaunch:
    """A running loop kernel, between two events of its stream."""

    def __init__(self, events: Events, begin: Any, end: Any) -> None:
        self._events = events
        self._begin = begin
        self._end = end

    def done(self) -> bool:
        """True once the kernel has ended. Raises GpuError after a device fault."""
        (code,) = cu.cuEventQuery(self._end)
        if code == cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check((code,), f"the loop kernel on {self._events.label}")
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Polls frequently at first, then every half millisecond; see Launch.wait."""
        begin = time.monotonic()
        while not self.done():
            waited = time.monotonic() - begin
            if timeout_s is not None and waited >= timeout_s:
                return False
            time.sleep(0.0 if waited < 0.002 else 0.0005)
        return True

    def elapsed_ms(self) -> float:
        """Milliseconds between the launch's two events."""
        return float(check(cu.cuEventElapsedTime(self._begin, self._end), "reading two events"))

    def __del__(self) -> None:
        self._events.release(self._begin, self._end)


def dimensions(grid: Grid) -> tuple[int, ...]:
    """The dimensions (x, y, z) of the grid and of its blocks, and the bytes of dynamic shared
    memory.
    """
    return grid.processors, 1, 1, grid.threads, 1, 1, grid.shared_bytes


def enqueue(program: Program, params: bytes, grid: Grid, queue: Any, doing: str) -> None:
    """Enqueues a launch. The context must be current. doing: the beginning of error messages."""
    values = np.frombuffer(params, np.uint8)
    pointers = np.array([values.ctypes.data], np.uint64)
    address = pointers.ctypes.data
    given = (program.function, *dimensions(grid))
    check(cu.cuLaunchCooperativeKernel(*given, queue, address), doing)
