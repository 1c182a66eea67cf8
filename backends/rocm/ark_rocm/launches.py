"""Launches of loop kernels on an AMD GPU, each between two events of a stream.

Called by device.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from dataclasses import dataclass
from typing import Any

from ark.backend.devices import Grid
from ark_rocm import driver
from ark_rocm.driver import call


@dataclass(frozen=True)
class Program:
    """A loaded code object and its loop kernel."""

    module: Any
    function: Any


class Launch:
    """A running loop kernel; see ark.backend.devices.Launch."""

    def __init__(
        self, hip: Any, index: int, stream: Any, program: Program, params: bytes, grid: Grid
    ) -> None:
        """Starts the kernel. The device `index` must be the calling thread's current device."""
        self._hip, self._index = hip, index
        self._params = ctypes.create_string_buffer(params, len(params))
        self._begin = call("hipEventCreate", hip.hipEventCreate)
        self._end = call("hipEventCreate", hip.hipEventCreate)
        call("hipEventRecord", hip.hipEventRecord, self._begin, stream)
        # A plain launch is used. A cooperative launch may share one queue with all copies of the
        # process, which would then wait for the kernel. Device.launch has checked that all blocks
        # are resident at once.
        call(
            "hipModuleLaunchKernel",
            hip.hipModuleLaunchKernel,
            program.function,
            grid.processors,
            1,
            1,
            grid.threads,
            1,
            1,
            grid.shared_bytes,
            stream,
            [ctypes.addressof(self._params)],
            None,
            doing=f"starting {grid.processors} blocks of {grid.threads} threads",
        )
        call("hipEventRecord", hip.hipEventRecord, self._end, stream)
        self._done = False

    def done(self) -> bool:
        if self._done:
            return True
        driver.select(self._hip, self._index)
        result = self._hip.hipEventQuery(self._end)
        code = result[0] if isinstance(result, tuple) else result
        if "NotReady" in getattr(code, "name", ""):
            return False
        if int(code) != 0:
            raise driver.failure("hipEventQuery", code, "running the loop kernel")
        self._done = True
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause = 20e-6
        while not self.done():
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)
        return True

    def elapsed_ms(self) -> float:
        driver.select(self._hip, self._index)
        elapsed = self._hip.hipEventElapsedTime
        return float(call("hipEventElapsedTime", elapsed, self._begin, self._end))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            for event in (self._begin, self._end):
                self._hip.hipEventDestroy(event)
