"""Threads that run launches. After a launch a thread is kept for the next one for some time,
because starting a thread takes longer than a small collective. Called by ark_cpu.device.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

from ark.backend import threads

IDLE_S = 5.0  # how long an idle thread is kept

Work = tuple[Callable[[], None], Callable[[], None]]


class _Worker:
    def __init__(self) -> None:
        self.given: queue.SimpleQueue[Work] = queue.SimpleQueue()
        threads.start(self._serve, name="ark-loop")

    def _serve(self) -> None:
        while True:
            try:
                work, ended = self.given.get(timeout=IDLE_S)
            except queue.Empty:
                with _lock:
                    if self in _idle:
                        _idle.remove(self)
                        return
                continue  # it was chosen in the meantime
            work()
            # The thread is listed as idle before `ended` is called, because the caller may then
            # launch again at once and reuse this thread.
            _idle.append(self)
            ended()
            del work, ended  # they hold memory of the launch


_lock = threading.Lock()
_idle: list[_Worker] = []


def run(work: Callable[[], None], ended: Callable[[], None]) -> None:
    """Calls `work`, then `ended`, on another thread. Neither may raise. Raises SystemError if the
    system refuses a thread.
    """
    with _lock:
        worker = _idle.pop() if _idle else None
    (worker or _Worker()).given.put((work, ended))


def _forget() -> None:
    """Clears the list of idle threads. Called in a forked process, in which these threads do not
    exist.
    """
    global _lock
    _lock = threading.Lock()
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
