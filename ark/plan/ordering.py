"""Finds the earlier tasks that each task of an op depends on, and the counters that it must wait
for.

For every task the sets of earlier tasks that it conflicts with are found from the regions they
touch. The tasks known to be complete when a task starts are a vector with one entry per processor
(a vector clock, Mattern 1989; ark.plan.clocks); a set that the vector covers needs no wait. Tasks
of an op that need the same sets and know the same share one decision. Used by ark.plan.schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ark.plan.access import Region
from ark.plan.clocks import Clocks
from ark.plan.frontier import Frontier

PACKETS, OTHERS = 0, 1  # whose packets are read, who else comes first
NO_ENDS = np.zeros(0, np.int64)
# A needed set as one number: its kind, the op (latest first) and its own number; sorted, those of a
# kind and an op stand side by side.
_KIND, _OP, _NUMBER = 56, 32, (1 << 32) - 1
_LAST_OP = (1 << 24) - 1


@dataclass(frozen=True, eq=False)
class TaskSet:
    """Tasks of one earlier op that tasks of a later one come after: their numbers, their
    processors (each once), and the places behind the last of them there.
    """

    op: int
    members: np.ndarray
    processors: np.ndarray
    ends: np.ndarray


@dataclass
class OpRun:
    """The tasks of an op: the number of the first, and by task its processor, the place behind it
    there and the clock that it began with.
    """

    first: int
    processors: np.ndarray
    ends: np.ndarray
    clocks: list[int]


@dataclass(frozen=True, eq=False)
class Needs:
    """Sets that tasks come after. packets: those whose packets are read, which loading them waits
    for. others: one of each op, the latest first.
    """

    packets: tuple[int, ...]
    others: tuple[int, ...]

    @property
    def sets(self) -> list[int]:
        return [*self.packets, *self.others]


@dataclass(frozen=True, eq=False)
class Decision:
    """The sets that tasks with equal needs and knowledge wait for, and what they know then.

    special: processors that know of their own tasks what the others do not.
    """

    waits: tuple[int, ...]
    clock: int
    special: frozenset[int]


class Ordering:
    """The tasks of a phase that were dealt so far, and their clocks."""

    def __init__(self, processors: int) -> None:
        self.clocks = Clocks(processors)
        self.frontier = Frontier()
        self.runs: dict[int, OpRun] = {}
        self.sets: list[TaskSet] = []
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._after: dict[int, np.ndarray] = {}  # by set
        self._missing: dict[tuple[int, int], frozenset[int]] = {}  # by row and set
        self._joined: dict[tuple[int, int], int] = {}  # by row and set

    def needs(self, mine: Sequence[Region], count: int) -> list[Needs | None]:
        """By task what it comes after; None for those that come after nothing."""
        producers: list[list[int]] = [[] for _ in range(count)]
        for access in mine:
            for other in self.frontier.conflicts(access):
                kind = PACKETS if access.packet and not access.write else OTHERS
                met = access.tasks_after(other)
                names = zip(met.theirs, met.their_names, met.mine_listed, strict=True)
                head = kind << _KIND | (_LAST_OP - other.op) << _OP
                for theirs, name, tasks in names:
                    code = head | self._set(other.op, theirs, name)
                    for task in tasks:
                        producers[task].append(code)
        distinct: dict[tuple[int, ...], Needs | None] = {(): None}
        joined: dict[tuple[int, ...], int] = {}
        listed: list[Needs | None] = []
        for codes in map(tuple, producers):
            if codes not in distinct:
                distinct[codes] = self._merged(codes, joined)
            listed.append(distinct[codes])
        return listed

    def _merged(self, codes: tuple[int, ...], joined: dict[tuple[int, ...], int]) -> Needs:
        """Needs with one set for each op and kind."""
        by_head: dict[int, list[int]] = {}
        for code in sorted(set(codes)):
            by_head.setdefault(code >> _OP, []).append(code & _NUMBER)
        merged: tuple[list[int], list[int]] = ([], [])
        for head, sets in by_head.items():
            number = sets[0]
            if len(sets) > 1:
                key = tuple(sets)
                if key not in joined:
                    joined[key] = self._union(self.sets[number].op, key)
                number = joined[key]
            merged[head >> _KIND - _OP].append(number)
        return Needs(tuple(merged[PACKETS]), tuple(merged[OTHERS]))

    def _set(self, op: int, tasks: np.ndarray, name: bytes) -> int:
        """The number of a set of an op's tasks, given by their places in it, also as bytes."""
        number = self._numbers.get((op, name))
        if number is None:
            number = self._numbers[op, name] = len(self.sets)
            run = self.runs[op]
            processors, ends = run.processors[tasks], run.ends[tasks]
            if len(tasks) > 1 and len(set(processors.tolist())) < len(tasks):
                # Tasks of one op on one processor follow each other: the last of them counts.
                order = np.lexsort((ends, processors))
                processors, ends = processors[order], ends[order]
                last = np.ones(len(tasks), bool)
                last[:-1] = processors[1:] != processors[:-1]
                processors, ends = processors[last], ends[last]
            self.sets.append(TaskSet(op, tasks + run.first, processors, ends))
        return number

    def add_set(self, op: int, members: np.ndarray) -> int:
        """The number of a set that no decision uses."""
        self.sets.append(TaskSet(op, members, NO_ENDS, NO_ENDS))
        return len(self.sets) - 1

    def _union(self, op: int, numbers: Sequence[int]) -> int:
        """The number of the set of all tasks of an op that are in one of the sets."""
        members = np.unique(np.concatenate([self.sets[s].members for s in numbers]))
        tasks = members - self.runs[op].first
        return self._set(op, tasks, tasks.tobytes())

    def begin(self, op: int, run: OpRun) -> None:
        """An op's tasks will be decided next."""
        self.runs[op] = run
        self._missing.clear()
        self._joined.clear()

    def decide(self, clock: int, needs: Needs, processor: int) -> Decision:
        """What a task on `processor` waits for; -1: one that is not special."""
        waits: list[int] = []
        special: set[int] = set()
        for number in needs.others:
            lacking = self._lacking(clock, number)
            if len(lacking) == 1:
                special |= lacking
            if lacking - {processor}:
                waits.append(number)
                clock = self._join(clock, number)
        return Decision(tuple(waits), clock, frozenset(special))

    def waits(self, clock: int, needs: Needs, processor: int) -> bool:
        """True where a task on `processor` must wait for a counter."""
        return any(
            self.clocks.missing(clock, needed.processors, needed.ends) - {processor}
            for needed in (self.sets[number] for number in needs.others)
        )

    def _lacking(self, row: int, number: int) -> frozenset[int]:
        lacking = self._missing.get((row, number))
        if lacking is None:
            needed = self.sets[number]
            lacking = self.clocks.missing(row, needed.processors, needed.ends)
            self._missing[row, number] = lacking
        return lacking

    def _join(self, row: int, number: int) -> int:
        row_after = self._joined.get((row, number))
        if row_after is None:
            after = self._after.get(number)
            if after is None:
                needed, run = self.sets[number], self.runs[self.sets[number].op]
                rows = {run.clocks[task] for task in (needed.members - run.first).tolist()}
                after = self._after[number] = self.clocks.after(
                    rows, needed.processors, needed.ends
                )
            row_after = self._joined[row, number] = self.clocks.join(row, after)
        return row_after
