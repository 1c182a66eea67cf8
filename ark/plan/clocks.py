"""What is known to be complete: vector clocks (Mattern 1989), shared by all who know the same.

A clock has two rows with an entry per processor: how many of its tasks have run, and of how many it
is seen what they wrote. A packet tells that its producer ran, but brings no other memory along; a
counter does both. What a task knows of its own processor follows from its place there and is left
out, so processors that waited for the same have the same clock, and only waits make new ones.
"""

from __future__ import annotations

import numpy as np

RAN, SEEN = 0, 1  # rows of a clock
START = 0  # the clock of those who know nothing


class Clocks:
    """Clocks by number; equal clocks have equal numbers."""

    def __init__(self, processors: int) -> None:
        self._rows: list[np.ndarray] = []
        self._numbers: dict[bytes, int] = {}
        self.number(np.zeros((2, processors), np.int32))

    def number(self, clock: np.ndarray) -> int:
        """The number of a clock."""
        key = clock.tobytes()
        if key not in self._numbers:
            self._numbers[key] = len(self._rows)
            self._rows.append(clock)
        return self._numbers[key]

    def missing(
        self, clock: int, which: int, lanes: np.ndarray, ends: np.ndarray
    ) -> frozenset[int]:
        """Processors with tasks that the clock does not cover; ends: places behind these tasks."""
        covered = self._rows[clock][which][lanes] >= ends
        if covered.all():
            return frozenset()
        return frozenset(lanes[~covered].tolist())

    def join(
        self,
        clock: int,
        clocks: np.ndarray,
        lanes: np.ndarray,
        ends: np.ndarray,
        packets: bool = False,
    ) -> int:
        """The clock after waiting for tasks, given by the clocks that they began with, their
        processors and the places behind them there.
        """
        made = self._rows[clock].copy()
        part = made[RAN] if packets else made
        for other in set(clocks.tolist()):
            row = self._rows[other]
            np.maximum(part, row[RAN] if packets else row, out=part)
        for row in made[:1] if packets else made:
            np.maximum.at(row, lanes, ends)
        return self.number(made)
