"""Determines for each task the sets of earlier tasks that it depends on, and the sets for which it
must wait. Used by ark.plan.schedule.

A task depends on the earlier tasks with which its memory accesses conflict. A vector clock (Mattern
1989; ark.plan.clocks) states which tasks are known to be complete when a task starts. If a task's
clock states that all tasks of a set are complete, the task needs no wait for this set. Tasks of an
op that depend on the same sets and have equal clocks need the same waits, which are determined
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ark.plan.access import Region
from ark.plan.clocks import Clocks
from ark.plan.frontier import Frontier

PACKETS, OTHERS = 0, 1  # PACKETS: dependency by reading packets. OTHERS: any other dependency
NO_ENDS = np.zeros(0, np.int64)
# Tasks that depend on the tasks of at least this many ops wait for all of them with one counter
# (ark.plan.schedule).
JOINT_SETS = 8
# A dependency is encoded as one integer. Its bits are, from the highest: the kind of the
# dependency, the op of the tasks that must run first (later ops have lower values), and the number
# of the set of these tasks. After sorting, sets of equal kind and op are adjacent.
_KIND, _OP, _NUMBER = 56, 32, (1 << 32) - 1
_LAST_OP = (1 << 24) - 1


@dataclass(frozen=True, eq=False)
class TaskSet:
    """A set of tasks of one op on which tasks of a later op depend. It has the numbers of the
    tasks, the processors on which they run (each listed once), and for each of these processors the
    position after the last of the tasks in its task list.
    """

    op: int
    members: np.ndarray
    processors: np.ndarray
    ends: np.ndarray


@dataclass
class OpRun:
    """Where and when the tasks of an op run: the number of the first task, and for each task its
    processor, its position there + 1, and the number of the vector clock with which it began.
    """

    first: int
    processors: np.ndarray
    ends: np.ndarray
    clocks: list[int]


@dataclass(frozen=True, eq=False)
class Needs:
    """The sets of earlier tasks on which a task depends. packets: the sets whose tasks write
    packets that the task reads. They need no counter, because reading a packet waits for it.
    others: all other sets, at most one per op, the latest op first.
    """

    packets: tuple[int, ...]
    others: tuple[int, ...]

    @property
    def sets(self) -> list[int]:
        return [*self.packets, *self.others]


@dataclass(frozen=True, eq=False)
class Decision:
    """The result for tasks of an op that have the same dependencies and equal vector clocks. waits:
    the numbers of the sets of tasks for which they must wait. clock: the number of their clock
    after the waits. special: the processors on which the result may be different, because some of
    the tasks to wait for run earlier on the same processor.
    """

    waits: tuple[int, ...]
    clock: int
    special: frozenset[int]


class Ordering:
    """The tasks of a phase that have been assigned to processors so far, and the vector clock of
    each.
    """

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
        """For each task of an op, the sets of earlier tasks on which it depends; None if there are
        none. mine: the op's memory accesses. count: its number of tasks.
        """
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
        """The `Needs` of the dependences that the integers `codes` encode (see _KIND). All sets of
        tasks that have the same op and kind are merged into one set.
        """
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
        packets, others = merged
        if len(others) >= JOINT_SETS:
            others = [self._rounded(number) for number in others]
        return Needs(tuple(packets), tuple(others))

    def _rounded(self, number: int) -> int:
        """The number of the set of all tasks of an op, if the set `number` has at least half of
        them; else the same number. Tasks that need different tasks of many ops, such as those that
        read the attention of a few heads of each sequence, then have the same dependences, and
        share a counter.
        """
        needed = self.sets[number]
        count = len(self.runs[needed.op].ends)
        if not count <= 2 * len(needed.members) < 2 * count:
            return number
        tasks = np.arange(count, dtype=needed.members.dtype)
        return self._set(needed.op, tasks, tasks.tobytes())

    def _set(self, op: int, tasks: np.ndarray, name: bytes) -> int:
        """The number of a set of tasks of an op; equal sets have equal numbers. tasks: the tasks'
        indices in the op. name: the same indices as bytes.
        """
        number = self._numbers.get((op, name))
        if number is None:
            number = self._numbers[op, name] = len(self.sets)
            run = self.runs[op]
            processors, ends = run.processors[tasks], run.ends[tasks]
            if len(tasks) > 1 and len(set(processors.tolist())) < len(tasks):
                # A processor runs its tasks in order. So for each processor, only the position (+
                # 1) of the last task of the set is kept.
                order = np.lexsort((ends, processors))
                processors, ends = processors[order], ends[order]
                last = np.ones(len(tasks), bool)
                last[:-1] = processors[1:] != processors[:-1]
                processors, ends = processors[last], ends[last]
            self.sets.append(TaskSet(op, tasks + run.first, processors, ends))
        return number

    def add_set(self, op: int, members: np.ndarray) -> int:
        """Adds a set of tasks for which tasks will wait by a counter, and returns the set's number.
        The set does not take part in `decide`.
        """
        self.sets.append(TaskSet(op, members, NO_ENDS, NO_ENDS))
        return len(self.sets) - 1

    def _union(self, op: int, numbers: Sequence[int]) -> int:
        """Adds the union of the op's task sets with these numbers; returns the number of the new
        set.
        """
        members = np.unique(np.concatenate([self.sets[s].members for s in numbers]))
        tasks = members - self.runs[op].first
        return self._set(op, tasks, tasks.tobytes())

    def begin(self, op: int, run: OpRun) -> None:
        """Stores the processors and positions of an op's tasks, and clears the caches of the
        previous op. Must be called before `decide` is called for tasks of the op.
        """
        self.runs[op] = run
        self._missing.clear()
        self._joined.clear()

    def decide(self, clock: int, needs: Needs, processor: int) -> Decision:
        """The waits of a task that depends on the sets `needs` and runs on `processor`. If
        `processor` is -1, the result is valid for every processor that is not in its field
        `special`. clock: the number of the task's vector clock before its waits.
        """
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
        """True if a task with these dependencies must wait for a counter when it runs on
        `processor`. clock: the number of its vector clock before.
        """
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
