"""When the host looks for the tokens of a running launch: soon after they were made, and seldom
before. Called by ark.serving.engine.
"""

from __future__ import annotations

import time

POLL_S, MAX_PAUSE_S = 2e-5, 5e-3
"""Shortest and longest pause between two looks."""
EARLY_SHARE = 0.6
"""Share of an iteration's usual time after which its tokens are looked for."""
LATE_SHARE = 1 / 32
"""How late a token may be seen, as a share of the time that it took."""
LATEST_WEIGHT = 1 / 4
"""Of the latest iteration, in the usual time of one."""


class Pace:
    """The usual time of iterations, learned from those that were seen."""

    def __init__(self) -> None:
        self._iteration_s = 0.0  # 0 while none is known
        self._seen = 0.0
        self._steady = False

    def begin(self) -> None:
        """A launch begins. Its first tokens may come behind a prompt: no time is learned there."""
        self._seen, self._steady = time.perf_counter(), False

    def saw(self, tokens: int) -> None:
        """A row has made so many tokens since the last call."""
        now = time.perf_counter()
        if self._steady:
            each_s = (now - self._seen) / tokens
            known = self._iteration_s or each_s
            self._iteration_s = known + LATEST_WEIGHT * (each_s - known)
        self._seen, self._steady = now, True

    def pause(self) -> None:
        """Sleeps until it is worth another look."""
        since_s = time.perf_counter() - self._seen
        pause_s = max(EARLY_SHARE * self._iteration_s - since_s, LATE_SHARE * since_s, POLL_S)
        time.sleep(min(pause_s, MAX_PAUSE_S))
