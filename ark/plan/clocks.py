"""Vector clocks (Mattern 1989), which state the tasks that are known to be complete when a task
begins. Used by ark.plan.ordering, which adds a wait only if the clock does not imply the order.

A clock is a row with one entry per processor: the number of its tasks that are complete. Tasks with
equal clocks share a row. Only a wait for a counter updates a clock. A packet does not, because it
publishes no other memory and its producer may still be running. The earlier tasks of a task's own
processor follow from its position and are not stored. So processors that waited for the same tasks
have the same row.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

START_ROW = 0  # the row without any completed task
NO_PROCESSORS = frozenset[int]()


class Clocks:
    """A table of all distinct clock rows, numbered from 0."""

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
        """The processors whose tasks are not known to be complete according to clock number `row`.
        processors, ends: the processors of the tasks to check, and on each the position after the
        last of them.
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
        """The clock that follows from waiting for a set of tasks. rows: the numbers of the clocks
        with which these tasks began. processors: their processors, each once. ends: on each of the
        processors, the position after the last of the tasks.
        """
        first, *others = rows
        clock: np.ndarray = self._rows[first].copy()
        for other in others:
            np.maximum(clock, self._rows[other], out=clock)
        clock[processors] = np.maximum(clock[processors], ends)
        return clock

    def join(self, row: int, after: np.ndarray) -> int:
        """The number of a task's clock after its waits. row: the number of its clock before its
        waits. after: the clock of all that it waits for (the result of the method `after`).
        """
        return self._number(np.maximum(self._rows[row], after))
