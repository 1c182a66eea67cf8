"""Threads of ark's own on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ark.errors import SystemError


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
