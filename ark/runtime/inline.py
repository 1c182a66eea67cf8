"""Runs many small launches of one kernel. Each launch is processed by the host thread that waits
for it. Handing it to another thread would take longer than a small collective. Called by
ark.distributed.calls and ark.interop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

from ark.backend.devices import Grid, InlineDevice, InlineLaunch, Launch
from ark.errors import GpuError, InvalidUsageError
from ark.runtime import live
from ark.runtime.executor import Executor, counts_on
from ark.runtime.run import Run
from ark.runtime.runner import Runner

MAX_INLINE_MS = 5.0

L = TypeVar("L", bound=Launch)


def inline_runs(executor: Runner) -> InlineRuns | None:
    """Inline launches of an executor's kernel. None if there are several ranks, the device cannot
    run launches inline, or launches of the plan cannot continue from one another.
    """
    if not isinstance(executor, Executor) or executor.ranks is not None:
        return None
    if not isinstance(executor.device, InlineDevice) or not counts_on(executor.plan):
        return None
    return InlineRuns(executor)


class Repeated(Generic[L]):
    """Launches of an executor's kernel that continue from one another (`Executor.resume`). Between
    them the executor may be launched in other ways.
    """

    def __init__(
        self, executor: Executor, prepare: Callable[[object, np.ndarray, Grid], L]
    ) -> None:
        """prepare: a function of the device that returns an object by which a loaded kernel can be
        launched repeatedly.
        """
        self._executor = executor
        self._prepare = prepare
        self._launch: L | None = None
        self._params: np.ndarray | None = None
        self._run: Run | None = None
        # Arrays with single words of the launch's record, because accessing a field of a NumPy
        # record takes several times as long.
        self._first: Any = None
        self._end: Any = None

    def _begin(self) -> Run:
        """Resets the counters and returns the launch's Run. Called for the first launch, and for
        the first one after the executor was launched in another way.
        """
        executor = self._executor
        executor.wait_idle()
        params = executor.resumable()
        if params is not self._params or self._launch is None:
            kernel = executor.kernels[0]
            grid = kernel.grid(executor.plan.processors)
            self._launch = self._prepare(kernel.loaded, params, grid)
            self._params = params
            self._first, self._end = params["first"].data, params["end"].data
        self._run = executor.watched(self._launch)
        return self._run


class InlineRuns(Repeated[InlineLaunch]):
    """Launches of one iteration each, on the caller's thread. Each call returns when its launch has
    ended.
    """

    def __init__(self, executor: Executor) -> None:
        """Raises InvalidUsageError if launches cannot continue or the device cannot run them
        inline.
        """
        if not isinstance(executor.device, InlineDevice):
            raise InvalidUsageError(
                "the device cannot run a launch on the caller's thread; use Executor.resume"
            )
        super().__init__(executor, executor.device.inline)
        self._broken = ""
        self._done: Any = None

    def __call__(self) -> None:
        """Runs one more iteration. Raises GpuError if a wait timed out or a rank has failed. After
        an interrupted call, a single rank starts again; with several ranks GpuError is raised.
        """
        if self._broken:
            raise GpuError(
                f"an earlier call failed ({self._broken}), so the ranks have run different "
                "numbers of iterations; start the job again"
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
        """True if the executor's last launch was so short that Ctrl-C may wait until a further
        launch ends. False before the first launch.
        """
        latest = self._executor.latest
        return latest is not None and latest.elapsed_ms() < MAX_INLINE_MS

    def _begin(self) -> Run:
        run = super()._begin()
        self._done = run.host["done"].data
        return run
