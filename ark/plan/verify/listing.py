"""A phase as arrays, for checks that examine all tasks at once.

A node is the number of a task. Tasks are counted processor by processor, in their order on each
processor. Used by all parts of the verifier.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ark.plan.types import Phase, Task


@dataclass(frozen=True, eq=False)
class Listing:
    """The tasks of a phase as arrays with one entry per node: its task, op, processor and position.
    A node is the number of a task in the phase. lengths: the number of tasks of each processor. A
    row of `waits` is (node, counter, threshold), a row of `signals` is (node, counter). by_op: for
    each op, its nodes and the coordinates of their tiles, both sorted by coordinates. So equal ops
    have equal lists of coordinates, regardless of the processors on which their tasks run.
    """

    tasks: tuple[Task, ...]
    op: np.ndarray
    processor: np.ndarray
    position: np.ndarray
    lengths: np.ndarray
    waits: np.ndarray
    signals: np.ndarray

    @cached_property
    def by_op(self) -> dict[int, tuple[np.ndarray, tuple[tuple[int, ...], ...]]]:
        order = np.argsort(self.op, kind="stable")
        ops, starts = np.unique(self.op[order], return_index=True)
        parts = np.split(order, starts[1:])
        nodes_of = {}
        for op, nodes in zip(ops.tolist(), parts, strict=True):
            placed = sorted((self.tasks[i].coord, i) for i in nodes.tolist())
            order = np.array([i for _, i in placed], np.int64)
            nodes_of[op] = (order, tuple(coord for coord, _ in placed))
        return nodes_of


def listing(phase: Phase) -> Listing:
    """The arrays of a phase."""
    tasks = tuple(task for listed in phase.processors for task in listed)
    lengths = np.array([len(listed) for listed in phase.processors], np.int64)
    starts = np.cumsum(lengths) - lengths
    processor = np.repeat(np.arange(len(lengths)), lengths)
    waits = [(i, c, n) for i, t in enumerate(tasks) for c, n in t.waits]
    signals = [(i, c) for i, t in enumerate(tasks) for c in t.signals]
    return Listing(
        tasks,
        np.array([t.op for t in tasks], np.int64),
        processor,
        np.arange(len(tasks)) - starts[processor] if tasks else processor,
        lengths,
        np.array(waits, np.int64).reshape(-1, 3),
        np.array(signals, np.int64).reshape(-1, 2),
    )
