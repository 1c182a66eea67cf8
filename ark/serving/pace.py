"""Chooses when the host polls a running launch for new tokens: soon after a token is written, and
rarely before. Called by ark.serving.engine.
"""

from __future__ import annotations

import time

POLL_S, MAX_PAUSE_S = 2e-5, 5e-3
"""The shortest and the longest pause between two polls."""
EARLY_SHARE = 0.6
"""Polling begins after this fraction of an iteration's estimated time."""
LATE_SHARE = 1 / 32
"""The largest delay in noticing a token, as a fraction of the time that the token took."""
LATEST_WEIGHT = 1 / 4
"""The weight of the latest iteration in the running average."""


class Pace:
    """Estimates how long an iteration takes from the times of earlier ones."""

    def __init__(self) -> None:
        self._iteration_s = 0.0  # 0 until an iteration has been timed
        self._seen = 0.0
        self._steady = False

    def begin(self) -> None:
        """Records the begin of a launch. The time to its first tokens is not used in the estimate,
        because it may include a prompt.
        """
        self._seen, self._steady = time.perf_counter(), False

    def saw(self, tokens: int) -> None:
        """Records that a row of the batch has sampled `tokens` new tokens since the last call."""
        now = time.perf_counter()
        if self._steady:
            each_s = (now - self._seen) / tokens
            known = self._iteration_s or each_s
            self._iteration_s = known + LATEST_WEIGHT * (each_s - known)
        self._seen, self._steady = now, True

    def pause(self) -> None:
        """Sleeps until the next tokens are expected."""
        since_s = time.perf_counter() - self._seen
        pause_s = max(EARLY_SHARE * self._iteration_s - since_s, LATE_SHARE * since_s, POLL_S)
        time.sleep(min(pause_s, MAX_PAUSE_S))
