"""The launches that are on a device now, so that none outlives the memory that it walks.

`Executor.start` adds a launch, whoever sees it end drops it. When the interpreter ends, those still
there are told to leave; what a device that does not come back may still use is kept for ever.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from typing import Any, Protocol

from ark import log


class Launched(Protocol):
    """What this needs of ark.runtime.run.Run. forked: it runs in the process that forked this."""

    forked: bool

    def abort(self) -> None: ...
    def stop(self) -> bool: ...


_runs: set[Launched] = set()


def add(run: Launched) -> None:
    """A launch has begun."""
    _runs.add(run)


def drop(run: Launched) -> None:
    """A launch has ended."""
    _runs.discard(run)


def keep(why: str, *objects: Any) -> None:
    """Never frees these objects, not even when the interpreter ends, and says so."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    log.warn(f"{why}; its memory is kept until this process ends")


def _forget() -> None:
    """A forked process has none of the launches, and must not stop those of the other."""
    for run in _runs:
        run.forked = True
    _runs.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@atexit.register
def stop_all() -> None:
    """Tells every kernel to leave, and waits within a bound."""
    for run in list(_runs):
        run.abort()
    for run in list(_runs):
        if not run.stop():
            keep("a kernel did not leave its device when the process ended", run)
