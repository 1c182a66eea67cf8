"""Runs many small launches of one kernel on a caller's streams. Everything that does not change
between launches is computed once, so that a launch takes little time on the host. Called by
ark.interop.torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ark.backend.devices import RepeatedLaunch, StreamDevice
from ark.errors import InvalidUsageError
from ark.runtime import live
from ark.runtime.executor import Executor
from ark.runtime.run import Run


class Streamed:
    """Runs launches of one plan that continue from one another (`Executor.resume`), each on a
    stream of the caller. A launch on another stream than the launches before it waits for them.
    """

    def __init__(self, executor: Executor) -> None:
        """Raises InvalidUsageError if launches cannot continue or the device has no streams."""
        if not isinstance(executor.device, StreamDevice):
            raise InvalidUsageError(
                "the device cannot launch on a caller's stream; use Executor.resume without a "
                "stream"
            )
        self._executor = executor
        self._repeated: RepeatedLaunch | None = None
        self._params: np.ndarray | None = None
        self._run: Run | None = None
        # Views of single words of the launch's records, because accessing a field of a NumPy record
        # takes several times as long.
        self._error: Any = None
        self._first: Any = None
        self._end: Any = None

    def __call__(self, stream: int, iterations: int = 1) -> None:
        """Launches a number of further iterations. Raises GpuError if a wait of an earlier launch
        timed out.
        """
        executor = self._executor
        run = self._run
        if run is None or executor.latest is not run or executor.resumed is None:
            run = self._begin()
        if self._error[0]:
            run.check()
        assert self._repeated is not None
        self._first[0] = executor.resumed
        self._end[0] = executor.resumed = run.iterations = run.iterations + iterations
        self._repeated(stream)
        live.add(run)

    def _begin(self) -> Run:
        """Resets the counters and returns the launch's Run. Called for the first launch, and for
        the first one after the executor was launched in another way.
        """
        executor, device = self._executor, self._executor.device
        assert isinstance(device, StreamDevice)
        executor.wait_idle()
        params = executor.resumable()
        if params is not self._params or self._repeated is None:
            kernel = executor.kernels[0]
            self._repeated = device.repeated_launch(
                kernel.loaded, params, kernel.grid(executor.plan.processors)
            )
            self._params = params
            self._first, self._end = params["first"].data, params["end"].data
        self._run = executor.watched(self._repeated)
        self._error = self._run.host["error"].data
        return self._run
