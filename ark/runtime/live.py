"""Keeps a list of the launches that run on devices, so that no launch outlives the memory that it
uses.

`Executor.start` adds a launch, and the code that notices its end removes it. When the interpreter
exits, the remaining launches are aborted. Memory that a hung device may still use is never freed.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from typing import Any, Protocol

from ark import log


class Launched(Protocol):
    """The members of ark.runtime.run.Run that this module uses. forked: True if the launch runs in
    the parent process from which this process was forked.
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
    """Keeps references to these objects for ever, so that they are not freed, not even when the
    interpreter exits. Logs the reason `why`.
    """
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    log.warn(f"{why}; the memory it uses is freed only when this process ends")


def _forget() -> None:
    """Clears the list in a forked process, which must not stop the launches of its parent."""
    for run in _runs:
        run.forked = True
    _runs.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@atexit.register
def stop_all() -> None:
    """Aborts all running kernels and waits a limited time for them to leave."""
    for run in list(_runs):
        run.abort()
    for run in list(_runs):
        if not run.stop():
            keep("a kernel did not leave its device at the end of the process", run)
