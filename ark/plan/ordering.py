"""What the tasks of an op come after, and which of it they must wait for.

For every task the sets of earlier tasks that it conflicts with are found from the regions they
touch. What is already known to be complete when a task starts is a vector with one entry per
processor (a vector clock, Mattern 1989; ark.plan.clocks); a set that the vector covers needs no
wait. Tasks of an op that need the same sets and know the same share one decision. Used by
ark.plan.schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ark.plan.access import Region
from ark.plan.clocks import RAN, SEEN, Clocks
from ark.plan.frontier import Frontier

Clock = tuple[int, int]  # what has run, what is seen
PACKETS, WRITTEN, READ = 0, 1, 2  # whose packets are read, what must be seen, what have run
NO_ENDS = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class TaskSet:
    """Tasks of one earlier op that tasks of a later one come after: their numbers, their
    processors (each once), and the places behind the last of them there.
    """

    op: int
    members: np.ndarray
    lanes: np.ndarray
    ends: np.ndarray


@dataclass
class OpRun:
    """The tasks of an op: the number of the first, and by task its processor, the place behind it
    there and the clock that it began with.
    """

    first: int
    lanes: np.ndarray
    ends: np.ndarray
    clocks: list[Clock]


@dataclass(frozen=True, eq=False)
class Needs:
    """Sets that tasks come after. packets: those whose packets are read. others: by op, latest
    first, (WRITTEN or READ, set).
    """

    packets: tuple[int, ...]
    others: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def sets(self) -> list[int]:
        return [*self.packets, *(number for listed in self.others for _, number in listed)]


@dataclass(frozen=True, eq=False)
class Decision:
    """The sets that tasks with equal needs and knowledge wait for, and what they know then.

    special: processors that know of their own tasks what the others do not.
    """

    waits: tuple[int, ...]
    clock: Clock
    special: frozenset[int]


class Ordering:
    """The tasks of a phase that were dealt so far, and what is known of them."""

    def __init__(self, processors: int) -> None:
        self.clocks = Clocks(processors)
        self.frontier = Frontier()
        self.runs: dict[int, OpRun] = {}
        self.sets: list[TaskSet] = []
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._after: dict[tuple[int, int], np.ndarray] = {}  # by set and kind of row
        self._missing: dict[tuple[int, int], frozenset[int]] = {}  # by row and set
        self._joined: dict[tuple[int, int, int], int] = {}  # by row, set and kind of row

    def needs(self, mine: Sequence[Region], count: int) -> list[Needs | None]:
        """By task what it comes after; None for those that come after nothing."""
        found: list[list[int]] = [[] for _ in range(count)]
        for access in mine:
            for other in self.frontier.conflicts(access):
                kind = PACKETS if access.packet and not access.write else READ
                kind = WRITTEN if other.write and kind == READ else kind
                met = access.tasks_after(other)
                names = zip(met.theirs, met.their_names, met.mine_listed, strict=True)
                for theirs, name, tasks in names:
                    code = 3 * self._set(other.op, theirs, name) + kind
                    for task in tasks:
                        found[task].append(code)
        distinct: dict[tuple[int, ...], Needs | None] = {(): None}
        joined: dict[tuple[int, ...], int] = {}
        listed: list[Needs | None] = []
        for codes in map(tuple, found):
            if codes not in distinct:
                distinct[codes] = self._merged(codes, joined)
            listed.append(distinct[codes])
        return listed

    def _merged(self, codes: tuple[int, ...], joined: dict[tuple[int, ...], int]) -> Needs:
        """Needs with one set for each op and kind."""
        by_op: dict[tuple[bool, int, int], set[int]] = {}
        for code in codes:
            number, kind = divmod(code, 3)
            by_op.setdefault((kind != PACKETS, -self.sets[number].op, kind), set()).add(number)
        packets: list[int] = []
        others: dict[int, list[tuple[int, int]]] = {}
        for (_, op, kind), sets in sorted(by_op.items()):
            key = tuple(sorted(sets))
            if len(key) > 1 and key not in joined:
                joined[key] = self._union(-op, key)
            number = joined[key] if len(key) > 1 else key[0]
            if kind == PACKETS:
                packets.append(number)
            else:
                others.setdefault(op, []).append((kind, number))
        return Needs(tuple(packets), tuple(map(tuple, others.values())))

    def _set(self, op: int, tasks: np.ndarray, name: bytes) -> int:
        """The number of a set of an op's tasks, given by their places in it, also as bytes."""
        number = self._numbers.get((op, name))
        if number is None:
            number = self._numbers[op, name] = len(self.sets)
            run = self.runs[op]
            lanes, ends = run.lanes[tasks], run.ends[tasks]
            if len(tasks) > 1 and len(set(lanes.tolist())) < len(tasks):
                # Tasks of one op on one processor follow each other: the last of them counts.
                order = np.lexsort((ends, lanes))
                lanes, ends = lanes[order], ends[order]
                last = np.ones(len(tasks), bool)
                last[:-1] = lanes[1:] != lanes[:-1]
                lanes, ends = lanes[last], ends[last]
            self.sets.append(TaskSet(op, tasks + run.first, lanes, ends))
        return number

    def add_set(self, op: int, members: np.ndarray) -> int:
        """The number of a set that nobody decides by."""
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

    def decide(self, clock: Clock, needs: Needs, lane: int) -> Decision:
        """What a task on processor `lane` waits for; -1: one that is not special."""
        ran, seen = clock
        waits: list[int] = []
        special: set[int] = set()
        for number in needs.packets:
            ran = self._join(ran, number, RAN)
        for listed in needs.others:
            missing = []
            for kind, number in listed:
                lacking = self._lacking(seen if kind == WRITTEN else ran, number)
                if lacking:
                    if len(lacking) == 1:
                        special |= lacking
                    if lacking - {lane}:
                        missing.append(number)
            if missing:
                number = missing[0]
                if len(missing) > 1:
                    number = self._union(self.sets[number].op, missing)
                waits.append(number)
                ran, seen = self._join(ran, number, RAN), self._join(seen, number, SEEN)
        return Decision(tuple(waits), (ran, seen), frozenset(special))

    def waits(self, clock: Clock, needs: Needs, lane: int) -> bool:
        """Must a task on processor `lane` wait for anything?"""
        ran, seen = clock
        return any(
            self.clocks.missing(row, needed.lanes, needed.ends) - {lane}
            for kind, number in (pair for listed in needs.others for pair in listed)
            for row, needed in [(seen if kind == WRITTEN else ran, self.sets[number])]
        )

    def _lacking(self, row: int, number: int) -> frozenset[int]:
        found = self._missing.get((row, number))
        if found is None:
            needed = self.sets[number]
            found = self.clocks.missing(row, needed.lanes, needed.ends)
            self._missing[row, number] = found
        return found

    def _join(self, row: int, number: int, which: int) -> int:
        found = self._joined.get((row, number, which))
        if found is None:
            after = self._after.get((number, which))
            if after is None:
                needed, run = self.sets[number], self.runs[self.sets[number].op]
                tasks = (needed.members - run.first).tolist()
                rows = {run.clocks[task][which] for task in tasks}
                after = self.clocks.after(rows, needed.lanes, needed.ends)
                self._after[number, which] = after
            found = self.clocks.join(row, after)
            self._joined[row, number, which] = found
        return found
