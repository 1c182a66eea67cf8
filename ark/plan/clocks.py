"""The tasks known to be complete: vector clocks (Mattern 1989), shared by tasks with equal ones.

A row has an entry per processor: how many of its tasks are complete. Counters alone tell: a packet
publishes no other memory, and its producer may still be at work. What a task knows of its own
processor follows from its place there and is left out, so processors that waited for the same have
the same rows, and only waits make new ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

START_ROW = 0  # the row of those who know nothing
NO_PROCESSORS = frozenset[int]()


class Clocks:
    """Rows by number; equal rows have equal numbers."""

    def __init__(self, processors: int) -> None:
        self._rows: list[np.ndarray] = []
        self._numbers: dict[bytes, int] = {}
        self._number(np.zeros(processors, np.int32))

    def _number(self, row: np.ndarray) -> int:
        key = row.tobytes()
        if key not in self._numbers:
            self._numbers[key] = len(self._rows)
            self._rows.append(row)
        return self._numbers[key]

    def missing(self, row: int, processors: np.ndarray, ends: np.ndarray) -> frozenset[int]:
        """Processors with tasks that a row does not cover; ends: places behind these tasks."""
        if len(processors) == 1:
            processor = processors.item()
            return (
                NO_PROCESSORS
                if self._rows[row].item(processor) >= ends.item()
                else frozenset((processor,))
            )
        covered = self._rows[row][processors] >= ends
        return NO_PROCESSORS if covered.all() else frozenset(processors[~covered].tolist())

    def after(self, rows: Iterable[int], processors: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The clock after waiting for tasks, given by the rows that they began with, their
        processors (each once) and the places behind them there.
        """
        first, *others = rows
        clock: np.ndarray = self._rows[first].copy()
        for other in others:
            np.maximum(clock, self._rows[other], out=clock)
        clock[processors] = np.maximum(clock[processors], ends)
        return clock

    def join(self, row: int, after: np.ndarray) -> int:
        """The row of a task that had `row` and has waited."""
        return self._number(np.maximum(self._rows[row], after))
