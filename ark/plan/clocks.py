"""The tasks known to be complete, as vector clocks (Mattern 1989); tasks with equal clocks share
them.

A row has an entry per processor: how many of its tasks are complete. Only counters update a clock:
a packet publishes no other memory, and its producer may still be running. The earlier tasks of a
task's own processor follow from its position there and are not stored. So processors that waited
for the same tasks have the same rows, and only waits create new rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

START_ROW = 0  # the row without any completed task
NO_PROCESSORS = frozenset[int]()


class Clocks:
    """The clocks' rows by number; equal rows have equal numbers."""

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
        """The processors that have tasks which a row does not cover. ends: the positions after
        these tasks.
        """
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
        """The clock after waiting for tasks. rows: the rows with which these tasks began.
        processors: their processors, each once. ends: the positions after the tasks on these
        processors.
        """
        first, *others = rows
        clock: np.ndarray = self._rows[first].copy()
        for other in others:
            np.maximum(clock, self._rows[other], out=clock)
        clock[processors] = np.maximum(clock[processors], ends)
        return clock

    def join(self, row: int, after: np.ndarray) -> int:
        """The row of a task that began with `row` and then waited, with the clock `after` from its
        waits.
        """
        return self._number(np.maximum(self._rows[row], after))
