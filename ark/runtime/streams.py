"""Runs many small launches of one kernel on streams of the caller. Everything that does not change
between launches is computed once, so that a launch takes little time on the host. Called by
ark.interop.torch.
"""

from __future__ import annotations

from typing import Any

from ark.backend.devices import RepeatedLaunch, StreamDevice
from ark.errors import InvalidUsageError
from ark.runtime import live
from ark.runtime.executor import Executor
from ark.runtime.inline import Repeated
from ark.runtime.run import Run


class Streamed(Repeated[RepeatedLaunch]):
    """Launches on streams of the caller. If the stream changes, a launch waits for the launches on
    the previous stream.
    """

    def __init__(self, executor: Executor) -> None:
        """Raises InvalidUsageError if launches cannot continue or the device has no streams."""
        if not isinstance(executor.device, StreamDevice):
            raise InvalidUsageError(
                "the device cannot launch on a caller's stream; use Executor.resume without a "
                "stream"
            )
        super().__init__(executor, executor.device.repeated_launch)
        self._error: Any = None

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
        assert self._launch is not None
        self._first[0] = executor.resumed
        self._end[0] = executor.resumed = run.iterations = run.iterations + iterations
        self._launch(stream)
        live.add(run)

    def _begin(self) -> Run:
        run = super()._begin()
        self._error = run.host["error"].data
        return run
