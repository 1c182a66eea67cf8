"""Scheduling: who runs a task and what it waits for.

Tasks are dealt to processors in program order. For every task the set of earlier tasks that it
conflicts with is computed from the regions they touch; tasks with the same set share one counter.
What is already known to be complete when a task starts is a vector with one entry per processor
(a vector clock, Mattern 1989); a set that the vector covers needs no wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ark.ir.dtype import by_name
from ark.machine import Machine
from ark.plan.access import Region, regions
from ark.plan.groups import Group
from ark.plan.kind import Access, OperandType, Signature
from ark.plan.kind import get as task_kind
from ark.plan.types import GATE, PlanBuffer, PlanCounter, PlanOp, PlanTensor, Task

EXECUTED, SEEN = 0, 1  # rows of a clock


@dataclass
class _Draft:
    """A task while its edges are being placed."""

    op: int
    coord: tuple[int, ...]
    processor: int
    position: int
    waits: dict[int, int] = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)


@dataclass
class _Entry:
    """Accesses of an op that later ops may conflict with."""

    op: int
    region: Region


@dataclass
class _Conflicts:
    """By earlier op, (tasks, tasks of that op) of bool: whose packets are read, what must be seen
    because it was written, and what must merely have been executed because it was read.
    """

    packets: dict[int, np.ndarray]
    written: dict[int, np.ndarray]
    read: dict[int, np.ndarray]


@dataclass
class _Counter:
    name: str
    step: int
    rank: int
    system: bool
    clock: np.ndarray | None = None


class Schedule:
    """Builds the phases of one rank's plan; counters are numbered across phases."""

    def __init__(
        self,
        machine: Machine,
        tensors: Sequence[PlanTensor],
        buffers: Sequence[PlanBuffer],
        rank: int,
        world_size: int,
    ) -> None:
        self.machine = machine
        self.tensors = tensors
        self.buffers = buffers
        self.rank = rank
        self.itemsizes = [8 if t.packet else by_name(t.dtype).itemsize for t in tensors]
        self._counters: list[_Counter] = [_Counter("gate", world_size, rank, world_size > 1)]
        self._mail: dict[tuple[int, str], int] = {}
        self._gates = [GATE] + [
            self._counter("gate", 0, other, True) for other in range(world_size) if other != rank
        ]

    def counters(self) -> tuple[PlanCounter, ...]:
        return tuple(
            PlanCounter(i, c.name, c.step, c.rank, c.system) for i, c in enumerate(self._counters)
        )

    def _counter(self, name: str, step: int, rank: int, system: bool) -> int:
        self._counters.append(_Counter(name, step, rank, system))
        return len(self._counters) - 1

    def phase(
        self, number: int, members: Sequence[tuple[int, Group]], ops: Sequence[PlanOp]
    ) -> tuple[tuple[Task, ...], ...]:
        """Schedules the groups of one phase; returns the task list of each processor."""
        run = _PhaseRun(self, number)
        for op, group in members:
            run.add(ops[op], group)
        return run.finish()

    def mail(self, rank: int, name: str, step: int) -> int:
        """The counter called `name` on `rank`; on this rank its step adds up over the awaits."""
        key = (rank, name)
        if key not in self._mail:
            self._mail[key] = self._counter(name, 0, rank, True)
        counter = self._mail[key]
        self._counters[counter].step = max(self._counters[counter].step, step)
        return counter

    def signature(self, op: PlanOp) -> Signature:
        operands = tuple(
            OperandType(
                self.tensors[t].dtype,
                self.tensors[t].shape,
                self.tensors[t].strides,
                self.tensors[t].packet,
            )
            for t in op.operands
        )
        return Signature(op.kind, op.params, operands)


class _PhaseRun:
    def __init__(self, schedule: Schedule, number: int) -> None:
        self.s = schedule
        self.number = number
        processors = schedule.machine.processors
        self.drafts: list[_Draft] = []
        self.lists: list[list[int]] = [[] for _ in range(processors)]
        # By processor, and by draft once it is complete: what has been executed, and what of it can
        # be seen. A packet tells that its producer ran, but brings no other memory along.
        self.clocks = np.zeros((2, processors, processors), np.int64)
        self.ends: list[np.ndarray] = []
        self.frontier: dict[tuple[str, int, int], list[_Entry]] = {}
        self.rotation = 0
        self.sets: dict[tuple[int, bytes], int] = {}
        self.ops: dict[int, PlanOp] = {}
        self.signatures: dict[int, Signature] = {}
        self.ranges: dict[int, tuple[int, int]] = {}  # op: its first draft, how many

    def add(self, op: PlanOp, group: Group) -> None:
        """Deals the group's tasks and places their waits."""
        begin, end = group.processors or (0, len(self.lists))
        begin = min(begin, len(self.lists) - 1)
        end = max(begin + 1, min(end, len(self.lists)))
        processors = end - begin
        count = len(group.coords)
        first = len(self.drafts)
        for i, coord in enumerate(group.coords):
            share = i * processors // count if count > processors else i
            processor = begin + (self.rotation + share) % processors
            self.drafts.append(_Draft(op.id, coord, processor, 0))
        self.rotation = (self.rotation + count) % len(self.lists)
        self.ranges[op.id] = (first, count)
        sig = self.s.signature(op)
        self.ops[op.id], self.signatures[op.id] = op, sig
        kind = task_kind(op.kind)
        accesses = [(i, a) for i, c in enumerate(group.coords) for a in kind.accesses(sig, c)]
        mine = regions(self.s.tensors, self.s.buffers, self.s.itemsizes, op.operands, accesses)
        mine += self._after(op, count)
        conflicts = self._conflicts(mine, count)
        for i in range(count):
            self._place(first + i, i, conflicts, group)
        self._remember(op.id, mine)

    def _after(self, op: PlanOp, count: int) -> list[Region]:
        """Pretended reads of the tensors that must be complete before the op starts."""
        shapes = [self.s.tensors[t].shape for t in op.after]
        pretended = [
            (i, Access(k, (0,) * len(shape), shape))
            for i in range(count)
            for k, shape in enumerate(shapes)
        ]
        return regions(self.s.tensors, self.s.buffers, self.s.itemsizes, op.after, pretended)

    def _conflicts(self, mine: Sequence[Region], count: int) -> _Conflicts:
        """What the op's tasks must come after."""
        found = _Conflicts({}, {}, {})
        for region in mine:
            for entry in self.frontier.get(region.space, ()):
                other = entry.region
                if not region.meets(other):
                    continue
                if region.begin >= other.end or other.begin >= region.end:
                    continue
                if region.packet and not region.write:
                    target = found.packets
                else:
                    target = found.written if other.write else found.read
                if entry.op not in target:
                    target[entry.op] = np.zeros((count, self.ranges[entry.op][1]), bool)
                rows, columns = np.nonzero(region.overlaps(other))
                target[entry.op][region.tasks[rows], other.tasks[columns]] = True
        return found

    def _place(self, index: int, row: int, conflicts: _Conflicts, group: Group) -> None:
        draft = self.drafts[index]
        clock = self.clocks[:, draft.processor].copy()
        for op, matrix in conflicts.packets.items():
            for other in np.flatnonzero(matrix[row]) + self.ranges[op][0]:
                np.maximum(clock[EXECUTED], self.ends[other][EXECUTED], out=clock[EXECUTED])
        for op in sorted({*conflicts.written, *conflicts.read}, reverse=True):
            missing: set[int] = set()
            for which, kind in ((SEEN, conflicts.written), (EXECUTED, conflicts.read)):
                if op in kind:
                    members = np.flatnonzero(kind[op][row]) + self.ranges[op][0]
                    if not all(self._complete(clock[which], int(m)) for m in members):
                        missing.update(int(m) for m in members)
            if not missing:
                continue
            counter = self._set_counter(op, np.array(sorted(missing), np.int64))
            draft.waits[counter] = self.s._counters[counter].step
            joined = self.s._counters[counter].clock
            assert joined is not None
            np.maximum(clock, joined, out=clock)
        if group.awaits:
            for mail, threshold in group.awaits[row]:
                draft.waits[self.s.mail(mail.rank, mail.name, threshold)] = threshold
        if group.sends:
            draft.signals += [self.s.mail(mail.rank, mail.name, 0) for mail in group.sends[row]]
        draft.position = len(self.lists[draft.processor])
        self.lists[draft.processor].append(index)
        clock[:, draft.processor] = draft.position + 1
        self.clocks[:, draft.processor] = clock
        self.ends.append(clock)

    def _complete(self, clock: np.ndarray, other: int) -> bool:
        draft = self.drafts[other]
        return bool(clock[draft.processor] > draft.position)

    def _set_counter(self, op: int, members: np.ndarray) -> int:
        """The counter that all tasks of `members` signal."""
        key = (op, members.tobytes())
        counter = self.sets.get(key)
        if counter is None:
            name = f"{self.number}.{op}.{len(self.sets)}"
            counter = self.s._counter(name, len(members), self.s.rank, False)
            self.sets[key] = counter
            clock = np.zeros((2, len(self.lists)), np.int64)
            for member in members:
                np.maximum(clock, self.ends[member], out=clock)
                self.drafts[member].signals.append(counter)
            self.s._counters[counter].clock = clock
        return counter

    def _remember(self, op: int, mine: Sequence[Region]) -> None:
        """Adds the op's accesses; drops those that its writes cover entirely.

        Whoever conflicts with a dropped access also conflicts with a task of this op that touches
        the same bytes and comes after it.
        """
        for region in mine:
            entries = self.frontier.setdefault(region.space, [])
            if region.write and _covers(region):
                entries[:] = [
                    e
                    for e in entries
                    if e.op == op or e.region.begin < region.begin or e.region.end > region.end
                ]
            entries.append(_Entry(op, region))

    def finish(self) -> tuple[tuple[Task, ...], ...]:
        """Adds the gate's signals to the last task and freezes the lists."""
        self._gate()
        frozen = []
        for indices in self.lists:
            tasks = []
            for i in indices:
                draft = self.drafts[i]
                tasks.append(
                    Task(
                        draft.op,
                        draft.coord,
                        tuple(sorted(draft.waits.items())),
                        tuple(sorted(draft.signals)),
                        task_kind(self.ops[draft.op].kind).stream(
                            self.signatures[draft.op], draft.coord
                        ),
                    )
                )
            frozen.append(tuple(tasks))
        return tuple(frozen)

    def _gate(self) -> None:
        """The last task of an iteration waits for the last task of every processor."""
        last = len(self.drafts) - 1
        draft = self.drafts[last]
        clock = self.ends[last]
        tails = [
            indices[-1]
            for indices in self.lists
            if indices and not self._complete(clock[SEEN], indices[-1])
        ]
        if tails:
            counter = self._set_counter(draft.op, np.array(tails, np.int64))
            draft.waits[counter] = len(tails)
        draft.signals += self.s._gates


def _covers(region: Region) -> bool:
    """True if the boxes, taken together, are all bytes between begin and end.

    The boxes of one op's writes never overlap, so their sizes must add up.
    """
    sizes = np.prod(region.hi - region.lo, axis=1).sum() * region.frame.itemsize
    return int(sizes) == region.end - region.begin
