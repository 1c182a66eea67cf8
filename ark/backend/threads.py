"""Starts host threads, and makes their sleeps precise. Called by the runtime, the serving engine
and the CPU's devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any

from ark.errors import SystemError

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000


def start(target: Callable[..., None], *args: Any, name: str = "ark") -> threading.Thread:
    """Starts a daemon thread; raises SystemError if the system refuses."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise SystemError(
            "the system refused to start a thread; raise the limit on processes and threads "
            "(`ulimit -u`) or on memory (`ulimit -v`)"
        ) from error
    return thread


def sleep_exactly() -> None:
    """Makes the calling thread's sleeps end on time; by default they may take 50 us longer. Has an
    effect on Linux only.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
