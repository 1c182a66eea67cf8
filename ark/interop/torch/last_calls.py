"""Measures the time per iteration of a program (a torch graph as a kernel), by launching many
iterations on the tensors of the program's last call. Usually they are freed after the call, so the
call must be made within the context `kept_tensors`, which keeps them. Called by
ark.interop.torch.program and ark.cli.measure.modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from ark.errors import InvalidUsageError
from ark.runtime.executor import Executor
from ark.runtime.runner import Runner

calls: WeakKeyDictionary[Any, Any] | None = None  # by program; None: tensors are not kept


@contextmanager
def kept_tensors() -> Iterator[None]:
    """Keeps the inputs and results of each program's last call alive."""
    global calls
    calls = WeakKeyDictionary()
    try:
        yield
    finally:
        calls = None


def iteration_seconds(program: object, executor: Runner, iterations: int) -> float:
    """Seconds per iteration of one launch of a program's loaded kernel."""
    if calls is None or program not in calls:
        raise InvalidUsageError("call and measure the model within kept_tensors()")
    if isinstance(executor, Executor):
        executor.wait_idle()
    run = executor.resume(iterations)
    run.wait()
    return run.elapsed_ms() / 1e3 / iterations
