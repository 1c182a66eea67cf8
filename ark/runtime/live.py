"""The launches that run on a device now, so that none outlives the memory that it uses.

`Executor.start` adds a launch; the code that sees it end removes it. When the interpreter exits,
remaining launches are aborted; memory that a hung device may still use is never freed.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from typing import Any, Protocol

from ark import log


class Launched(Protocol):
    """The part of ark.runtime.run.Run that this module needs. forked: the launch runs in the parent
    process of this fork.
    """

    forked: bool

    def abort(self) -> None: ...
    def stop(self) -> bool: ...


_runs: set[Launched] = set()


def add(run: Launched) -> None:
    """Adds a launch that has begun."""
    _runs.add(run)


def drop(run: Launched) -> None:
    """Removes a launch that has ended."""
    _runs.discard(run)


def keep(why: str, *objects: Any) -> None:
    """Never frees these objects, not even when the interpreter exits, and logs that."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    log.warn(f"{why}; its memory is freed only when this process ends")


def _forget() -> None:
    """Clears the launches in a forked process, which must not stop those of its parent."""
    for run in _runs:
        run.forked = True
    _runs.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@atexit.register
def stop_all() -> None:
    """Aborts every kernel and waits a limited time."""
    for run in list(_runs):
        run.abort()
    for run in list(_runs):
        if not run.stop():
            keep("a kernel did not leave its device at the end of the process", run)
