"""Launches the same kernel frequently on a caller's streams. The parameters are prepared once, and
a compiled function (repeated_launch.cpp) calls the driver. Without a C++ compiler the Python
bindings are used. For a launch's three driver calls they take 2.6 us more, and twice that if other
work has evicted their code from the caches. Called by device.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from types import ModuleType

import numpy as np

from ark.backend.devices import Grid
from ark.errors import InvalidUsageError
from ark.runtime.extension import optional
from ark_cuda.driver import check, cu, current
from ark_cuda.launches import CudaLaunch, Events, Program, dimensions

FUNCTIONS = ("cuCtxGetCurrent", "cuLaunchCooperativeKernel", "cuEventRecord")
OTHER_CONTEXT_CODE = -1  # OTHER of repeated_launch.cpp: another context is current


class CudaRepeatedLaunch(CudaLaunch):
    """Launches one kernel repeatedly (StreamDevice.repeated_launch); every launch reads the same
    block of parameters. An event marks the end of the latest launch. The next launch waits for this
    event, also on another stream.
    """

    def __init__(self, events: Events, program: Program, params: np.ndarray, grid: Grid) -> None:
        doing = f"launching the loop kernel on {events.label}"
        super().__init__(events, events.take(doing), events.take(doing))
        self._params = params
        self._pointers = np.array([params.ctypes.data], np.uint64)
        self._given = (program.function, *dimensions(grid))
        self._address = int(self._pointers.ctypes.data)
        self._doing = doing
        self._stream: int | None = None
        self._queue = cu.CUstream(0)
        self._quick = self._launcher()

    def _launcher(self) -> Callable[[int], int] | None:
        module = _module()
        if module is None:
            return None
        library = ctypes.CDLL("libcuda.so.1")
        functions = [ctypes.cast(getattr(library, f), ctypes.c_void_p).value for f in FUNCTIONS]
        function, *grid = self._given
        words = (self._events.context, function, self._end, self._address, *grid)
        launcher: Callable[[int], int] = module.launcher(*functions, *(int(w) for w in words))
        return launcher

    def __call__(self, stream: int) -> None:
        if stream == self._stream and self._quick is not None:
            code = self._quick(stream)
            if code == 0:
                return
            if code != OTHER_CONTEXT_CODE:
                check((cu.CUresult(code),), self._doing)
        self._launch(stream)

    def _launch(self, stream: int) -> None:
        """Launches through the Python bindings: used if the stream is not the prepared one, or if
        another context is current.
        """
        with current(self._events.context):
            if stream != self._stream:
                self._queue = cu.CUstream(stream)
                if self._stream is not None:
                    check(cu.cuStreamWaitEvent(self._queue, self._end, 0), self._doing)
                self._stream = stream
            check(
                cu.cuLaunchCooperativeKernel(*self._given, self._queue, self._address), self._doing
            )
            check(cu.cuEventRecord(self._end, self._queue), self._doing)

    def elapsed_ms(self) -> float:
        """Raises InvalidUsageError, because repeated launches are not timed."""
        raise InvalidUsageError("these launches are not timed; time them on the stream")


@cache
def _module() -> ModuleType | None:
    """Compiles repeated_launch.cpp."""
    return optional(
        "ark_repeated_launch",
        "ark_cuda",
        "repeated_launch.cpp",
        "launches on a stream",
        "launches on streams take longer",
    )
