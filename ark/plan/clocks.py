"""Vector clocks (Mattern 1989), which state the tasks that are known to be complete when a task
begins. Used by ark.plan.ordering, which adds a wait only if the clock does not imply the order.

A clock is a row with one entry per processor: how many tasks from the start of the processor's list
are known to be complete. Tasks with equal clocks share a row.

Only a wait for a counter updates a clock. Reading a packet (a value with its own ready flag) does
not, because the task that wrote the packet may still be running and its other writes may not be
visible. A task always comes after the earlier tasks of its own processor; this is not stored in its
clock. So tasks of different processors that waited for the same tasks share a row.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

START_ROW = 0  # the row without any completed task
NO_PROCESSORS = frozenset[int]()


class Clocks:
    """A table of all different vector clocks, which are rows numbered from 0."""

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
        """Returns the processors on which a task must still wait. The tasks that must be complete
        are all those before position ends[i] on processors[i], for each i. row: the number of the
        task's vector clock. A processor is returned if this clock does not imply that its tasks are
        complete.
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
        """The clock of a task that has waited for a set of tasks. rows: the numbers of the clocks
        with which the tasks of the set began. processors: the processors of these tasks, each
        listed once. ends: for each of these processors, the position after the last task of the
        set.
        """
        first, *others = rows
        clock: np.ndarray = self._rows[first].copy()
        for other in others:
            np.maximum(clock, self._rows[other], out=clock)
        clock[processors] = np.maximum(clock[processors], ends)
        return clock

    def join(self, row: int, after: np.ndarray) -> int:
        """The number of a task's clock after its waits. row: the number of its clock before the
        waits. after: the clock that follows from the waits (a result of the method `after`).
        """
        return self._number(np.maximum(self._rows[row], after))
