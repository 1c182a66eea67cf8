"""Many small launches of one kernel, each on the thread of whoever waits for it: to wake another
thread, and to be woken by it, takes longer than a small collective. Called by
ark.distributed.calls and ark.interop.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ark.backend.devices import InlineDevice, InlineLaunch
from ark.errors import GpuError, InvalidUsageError
from ark.runtime import live
from ark.runtime.executor import Executor, counts_on
from ark.runtime.run import Run
from ark.runtime.runner import Runner

SHORT_MS = 5.0


def inline_runs(executor: Runner) -> InlineRuns | None:
    """Those of a lone process's kernel whose launches can be such; None for others."""
    if not isinstance(executor, Executor) or executor.ranks is not None:
        return None
    if not isinstance(executor.device, InlineDevice) or not counts_on(executor.plan):
        return None
    return InlineRuns(executor)


class InlineRuns:
    """Launches of an executor that go on from one another (`Executor.resume`), one iteration each,
    waited for. Between them the executor may be launched in other ways.
    """

    def __init__(self, executor: Executor) -> None:
        """InvalidUsageError where launches cannot go on, or the device runs none so."""
        if not isinstance(executor.device, InlineDevice):
            raise InvalidUsageError("the device runs no launch on a caller's thread")
        self._executor = executor
        self._launch: InlineLaunch | None = None
        self._params: np.ndarray | None = None
        self._run: Run | None = None
        self._broken = ""
        self._first: Any = None  # words of the parameters and of the host's, as memory: an array's
        self._end: Any = None  # field costs several times as much
        self._done: Any = None

    def __call__(self) -> None:
        """Runs one iteration more. Raises GpuError if a wait gave up, a rank has failed, or, where
        there are several ranks, a call before was interrupted; a lone one begins anew then.
        """
        if self._broken:
            raise GpuError(
                f"a call before this one did not end ({self._broken}), so that the ranks are no "
                "longer in step; start the job again"
            )
        executor, run = self._executor, self._run
        if run is None or executor.latest is not run or executor.resumed is None:
            run = self._begin()
        assert self._launch is not None and executor.resumed is not None
        self._first[0] = executor.resumed
        self._end[0] = executor.resumed = run.iterations = executor.resumed + 1
        live.add(run)
        executor.wake()
        try:
            self._launch(run.check, run.abort)
            run.check()
            if self._done[0] != run.iterations:
                run.check_complete()
        except BaseException as error:
            if executor.ranks is None:
                executor.resumed = None
                raise
            self._broken = str(error) or type(error).__name__
            raise
        finally:
            live.drop(run)

    def short(self) -> bool:
        """Was the executor's last launch, of whatever kind, so short that Ctrl-C may wait for the
        end of another one? False before the first.
        """
        latest = self._executor.latest
        return latest is not None and latest.elapsed_ms() < SHORT_MS

    def _begin(self) -> Run:
        """The first launch, or the first one behind launches of another kind."""
        executor, device = self._executor, self._executor.device
        assert isinstance(device, InlineDevice)
        executor.wait_idle()
        params = executor.resumable()
        if params is not self._params or self._launch is None:
            kernel = executor.kernels[0]
            self._launch = device.inline(
                kernel.loaded, params, kernel.grid(executor.plan.processors)
            )
            self._params = params
            self._first, self._end = params["first"].data, params["end"].data
        self._run = executor.watched(self._launch)
        self._done = self._run.host["done"].data
        return self._run
