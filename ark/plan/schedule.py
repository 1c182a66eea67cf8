"""Scheduling: who runs a task and what it waits for.

Tasks are dealt to processors in program order. For every task the set of earlier tasks that it
conflicts with is computed from the regions they touch; tasks with the same set share one counter.
What is already known to be complete when a task starts is a vector with one entry per processor
(a vector clock, Mattern 1989; ark.plan.clocks); a set that the vector covers needs no wait. Tasks
of an op that need the same sets and know the same share one decision.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ark.machine import Machine
from ark.plan.access import Region, region
from ark.plan.boxes import Templates
from ark.plan.clocks import RAN, SEEN, START, Clocks
from ark.plan.frontier import Frontier
from ark.plan.groups import Group
from ark.plan.kind import OperandType, Signature
from ark.plan.types import ITERATION_BARRIER, PlanBuffer, PlanCounter, PlanOp, PlanTensor, Task
from ark.variant import COMMUNICATE

NOTHING = np.zeros(0, np.int64)
NOBODY = (frozenset[int](), frozenset[int]())
Need = tuple[int, int, int]  # earlier op; PACKETS, WRITTEN or READ; set
Clock = tuple[int, int]  # what has run, what is seen
PACKETS, WRITTEN, READ = 0, 1, 2  # whose packets are read, what must be seen, what have run


@dataclass(frozen=True, eq=False)
class _Set:
    """Tasks of one earlier op that tasks of a later one come after: their numbers, their
    processors (each once), the places behind the last of them there, and the clocks that they
    began with.
    """

    op: int
    members: np.ndarray
    lanes: np.ndarray
    ends: np.ndarray
    clocks: tuple[frozenset[int], frozenset[int]]


@dataclass
class _OpRun:
    """The tasks of an op: the number of the first, and by task its processor, the place behind it
    there and the clock that it began with.
    """

    first: int
    lanes: np.ndarray
    ends: np.ndarray
    clocks: list[Clock]


@dataclass(frozen=True)
class _Decision:
    """The sets that tasks with equal needs and knowledge wait for, and what they know then.

    special: processors that know of their own tasks what the others do not.
    """

    waits: tuple[int, ...]
    clock: Clock
    special: frozenset[int]


@dataclass
class _Counter:
    name: str
    step: int
    rank: int
    system: bool


@dataclass
class _Draft:
    """A task while its waits and signals are being placed."""

    waits: dict[int, int] = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)


class Schedule:
    """Builds the phases of one rank's plan; counters are numbered across phases."""

    def __init__(
        self,
        machine: Machine,
        tensors: Sequence[PlanTensor],
        buffers: Sequence[PlanBuffer],
        rank: int,
        world_size: int,
        templates: Templates,
        together: int,
        phases: int = 1,
    ) -> None:
        """together: how many ranks begin an iteration together: all, or this one alone.
        phases: how many the plan has.
        """
        self.machine = machine
        self.tensors = tensors
        self.buffers = buffers
        self.rank = rank
        self.templates = templates
        self.only = world_size == 1 and phases == 1
        self.counter_list: list[_Counter] = [
            _Counter("iteration barrier", together, rank, together > 1)
        ]
        self._semaphores: dict[tuple[int, str], int] = {}
        self.barriers = [ITERATION_BARRIER] + [
            self.counter("iteration barrier", 0, (rank + step) % world_size, True)
            for step in range(1, together)
        ]

    def counters(self) -> tuple[PlanCounter, ...]:
        return tuple(
            PlanCounter(i, c.name, c.step, c.rank, c.system)
            for i, c in enumerate(self.counter_list)
        )

    def counter(self, name: str, step: int, rank: int, system: bool) -> int:
        self.counter_list.append(_Counter(name, step, rank, system))
        return len(self.counter_list) - 1

    def phase(
        self, number: int, members: Sequence[tuple[int, Group]], ops: Sequence[PlanOp]
    ) -> tuple[tuple[Task, ...], ...]:
        """Schedules the groups of one phase; returns the task list of each processor."""
        run = _PhaseRun(self, number)
        for op, group in members:
            run.add(ops[op], group)
        return run.finish()

    def unscheduled(
        self, members: Sequence[tuple[int, Group]], ops: Sequence[PlanOp]
    ) -> tuple[Task, ...]:
        """The tasks of a phase in program order, without waits and signals."""
        made: list[Task] = []
        for op, group in members:
            coords = tuple(group.coords)
            streams = self.templates.streams(self.signature(ops[op]), coords)
            pairs = zip(coords, streams, strict=True)
            made += (Task(op, coord, fetches=fetches) for coord, fetches in pairs)
        return tuple(made)

    def semaphore(self, rank: int, name: str, step: int) -> int:
        """The counter called `name` on `rank`; its step is what this rank waits for."""
        key = (rank, name)
        if key not in self._semaphores:
            self._semaphores[key] = self.counter(name, 0, rank, True)
        counter = self._semaphores[key]
        self.counter_list[counter].step = max(self.counter_list[counter].step, step)
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
        self.lists: list[list[int]] = [[] for _ in range(processors)]
        self.clocks = Clocks(processors)
        self.now: list[Clock] = [
            (START, START)
        ] * processors  # the clock that each processor's next task starts with
        self.frontier = Frontier()
        self.rotation = 0
        self.drafts: list[_Draft] = []
        self.groups: list[tuple[PlanOp, Group, Signature]] = []
        self.runs: dict[int, _OpRun] = {}
        self.sets: list[_Set] = []
        self.set_ids: dict[tuple[int, bytes], int] = {}
        self.set_counters: dict[int, int] = {}
        self.missing: dict[tuple[int, int], frozenset[int]] = {}  # by row and set
        self.joined: dict[tuple[int, int, int], int] = {}  # by row, set and kind of row

    def add(self, op: PlanOp, group: Group) -> None:
        """Deals the group's tasks and places their waits."""
        first, count = len(self.drafts), len(group.coords)
        sig = self.s.signature(op)
        self.groups.append((op, group, sig))
        self.drafts += [_Draft() for _ in range(count)]
        mine = self._regions(op, sig, tuple(group.coords))
        needs = self._needs(mine, count)
        lanes = self._follow(group, needs)
        if lanes is None:
            lanes = self._deal(group, count)
        run = _OpRun(first, lanes, np.zeros(count, np.int64), [])
        self.runs[op.id] = run
        decisions: dict[tuple[Clock, tuple[Need, ...]], _Decision] = {}
        self.missing.clear()
        self.joined.clear()
        for i, lane in enumerate(lanes.tolist()):
            clock = self.now[lane]
            if needs[i]:
                decision = decisions.get((clock, needs[i]))
                if decision is None:
                    decision = self._decide(clock, needs[i], -1)
                    decisions[clock, needs[i]] = decision
                if lane in decision.special:
                    decision = self._decide(clock, needs[i], lane)
                draft = self.drafts[first + i]
                for number in decision.waits:
                    draft.waits[self._counter(number)] = len(self.sets[number].members)
                clock = self.now[lane] = decision.clock
            self.lists[lane].append(first + i)
            run.ends[i] = len(self.lists[lane])
            run.clocks.append(clock)
        self._pair(group, first)
        self.frontier.add(mine)

    def _follow(self, group: Group, needs: Sequence[tuple[Need, ...]]) -> np.ndarray | None:
        """The processors where each task comes right behind the only one that it needs, so that a
        chain of small ops hands nothing over; None where tasks need more, or share what they need.
        """
        placed = group.processors or group.granularity is not None or group.sends or group.awaits
        if placed or len(needs) > len(self.lists) or self.s.machine.variant.role(COMMUNICATE):
            return None
        lanes: list[int] = []
        for need in needs:
            makers = {m for _, _, number in need for m in self.sets[number].members.tolist()}
            found = {lane for _, _, number in need for lane in self.sets[number].lanes.tolist()}
            if len(found) != 1 or self.lists[min(found)][-1] not in makers:
                return None
            lanes += found
        return np.array(lanes, np.int64) if len(set(lanes)) == len(lanes) else None

    def _deal(self, group: Group, count: int) -> np.ndarray:
        """The processor of each task: round robin, whole shares where there are many, or as many at
        a time as was asked for.
        """
        begin, end = group.processors or (0, len(self.lists))
        processors = end - begin
        share = np.arange(count, dtype=np.int64)
        if group.granularity is not None:
            lanes: np.ndarray = begin + share // group.granularity % processors
            return lanes
        if count > processors:
            share = share * processors // count
        lanes = begin + (self.rotation + share) % processors
        self.rotation = (self.rotation + count) % len(self.lists)
        return lanes

    def _pair(self, group: Group, first: int) -> None:
        """The waits and signals between ranks, which the lowering named."""
        for i, awaited in enumerate(group.awaits):
            for far, threshold in awaited:
                counter = self.s.semaphore(far.rank, far.name, max(threshold, 1))
                self.drafts[first + i].waits[counter] = threshold
        for i, sent in enumerate(group.sends):
            signals = [self.s.semaphore(far.rank, far.name, 0) for far in sent]
            self.drafts[first + i].signals += signals

    def _regions(
        self, op: PlanOp, sig: Signature, coords: tuple[tuple[int, ...], ...]
    ) -> list[Region]:
        found = []
        for boxes in self.s.templates.boxes(sig, coords):
            tensor = self.s.tensors[op.operands[boxes.operand]]
            found.append(region(op.id, boxes, tensor, self.s.buffers[tensor.buffer]))
        for number in op.after:  # as if read whole, so that the op comes after what writes them
            tensor = self.s.tensors[number]
            boxes = self.s.templates.whole(tensor.items, tensor.itemsize, len(coords))
            found.append(region(op.id, boxes, tensor, self.s.buffers[tensor.buffer], True))
        return found

    def _needs(self, mine: Sequence[Region], count: int) -> list[tuple[Need, ...]]:
        """By task what it must come after, latest op first."""
        found: list[dict[tuple[int, int], set[int]]] = [{} for _ in range(count)]
        for own in mine:
            boxes = own.boxes
            by_box: dict[tuple[int, int], dict[int, set[int]]] = {}
            for other in self.frontier.conflicts(own):
                kind = PACKETS if own.packet and not own.write else READ
                kind = WRITTEN if other.write and kind == READ else kind
                sets = by_box.setdefault((other.op, kind), {})
                for box, tasks, key in own.tasks_met(other):
                    sets.setdefault(box, set()).add(self._set(other.op, tasks, key))
            if not by_box:
                continue
            rows = list(zip(boxes.tasks.tolist(), boxes.box.tolist(), strict=True))
            for need, sets in by_box.items():
                for task, box in rows:
                    if box in sets:
                        found[task].setdefault(need, set()).update(sets[box])
        joined: dict[tuple[int, ...], int] = {}
        return [self._sorted(each, joined) for each in found]

    def _sorted(
        self, needs: dict[tuple[int, int], set[int]], joined: dict[tuple[int, ...], int]
    ) -> tuple[Need, ...]:
        listed = []
        for (op, kind), sets in needs.items():
            key = tuple(sorted(sets))
            if len(key) == 1:
                number = key[0]
            elif key in joined:
                number = joined[key]
            else:
                number = joined[key] = self._union(op, key)
            listed.append((op, kind, number))
        return tuple(sorted(listed, key=lambda n: (n[1] != PACKETS, -n[0], n[1])))

    def _set(self, op: int, tasks: np.ndarray, key: bytes) -> int:
        """The number of a set of an op's tasks, given by their places in it, also as bytes."""
        number = self.set_ids.get((op, key))
        if number is None:
            number = self.set_ids[op, key] = len(self.sets)
            run = self.runs[op]
            clocks = [run.clocks[t] for t in tasks.tolist()]
            rows = frozenset(c[RAN] for c in clocks), frozenset(c[SEEN] for c in clocks)
            # Tasks of one op on one processor follow each other: the last of them counts.
            last = np.ones(len(tasks), bool)
            lanes, ends = run.lanes[tasks], run.ends[tasks]
            if len(set(lanes.tolist())) < len(tasks):
                order = np.lexsort((ends, lanes))
                lanes, ends = lanes[order], ends[order]
                last[:-1] = lanes[1:] != lanes[:-1]
            self.sets.append(_Set(op, tasks + run.first, lanes[last], ends[last], rows))
        return number

    def _union(self, op: int, numbers: Sequence[int]) -> int:
        """The number of the set of all tasks of an op that are in one of the sets."""
        members = np.unique(np.concatenate([self.sets[s].members for s in numbers]))
        tasks = members - self.runs[op].first
        return self._set(op, tasks, tasks.tobytes())

    def _decide(self, clock: Clock, needs: tuple[Need, ...], lane: int) -> _Decision:
        """What a task on processor `lane` waits for; -1: one that is not special."""
        ran, seen = clock
        waits: list[int] = []
        special: set[int] = set()
        for (packets, op), listed in itertools.groupby(
            needs, key=lambda n: (n[1] == PACKETS, n[0])
        ):
            missing = []
            for _, kind, number in listed:
                if packets:
                    ran = self._join(ran, number, RAN)
                    continue
                lacking = self._missing(seen if kind == WRITTEN else ran, number)
                if len(lacking) == 1:
                    special |= lacking
                if lacking - {lane}:
                    missing.append(number)
            if missing:
                number = missing[0] if len(missing) == 1 else self._union(op, missing)
                waits.append(number)
                ran, seen = self._join(ran, number, RAN), self._join(seen, number, SEEN)
        return _Decision(tuple(waits), (ran, seen), frozenset(special))

    def _missing(self, row: int, number: int) -> frozenset[int]:
        found = self.missing.get((row, number))
        if found is None:
            needed = self.sets[number]
            found = self.clocks.missing(row, needed.lanes, needed.ends)
            self.missing[row, number] = found
        return found

    def _join(self, row: int, number: int, which: int) -> int:
        found = self.joined.get((row, number, which))
        if found is None:
            needed = self.sets[number]
            found = self.clocks.join(row, needed.clocks[which], needed.lanes, needed.ends)
            self.joined[row, number, which] = found
        return found

    def _counter(self, number: int) -> int:
        """The counter that all tasks of a set signal."""
        counter = self.set_counters.get(number)
        if counter is None:
            needed = self.sets[number]
            name = f"{self.number}.{needed.op}.{len(self.set_counters)}"
            counter = self.s.counter(name, len(needed.members), self.s.rank, False)
            self.set_counters[number] = counter
            for member in needed.members.tolist():
                self.drafts[member].signals.append(counter)
        return counter

    def finish(self) -> tuple[tuple[Task, ...], ...]:
        """Adds the signals of the iteration barrier to the last task and freezes the lists."""
        self._barrier()
        made: list[Task] = []
        for op, group, sig in self.groups:
            coords = tuple(group.coords)
            for coord, fetches in zip(coords, self.s.templates.streams(sig, coords), strict=True):
                draft = self.drafts[len(made)]
                waits, signals = tuple(sorted(draft.waits.items())), tuple(sorted(draft.signals))
                made.append(Task(op.id, coord, waits, signals, fetches))
        return tuple(tuple(made[i] for i in indices) for indices in self.lists)

    def _barrier(self) -> None:
        """Whoever opens the next iteration comes after everything in this one.

        Where one rank has one phase, all last tasks that no other last one has seen open it
        together. Else, so that one signal a rank will do in every phase, the last task does, which
        waits for the last of every processor.
        """
        if self.s.only:
            self._open_together()
        else:
            self._open_at_the_end()

    def _open_together(self) -> None:
        tails = {lane: listed[-1] for lane, listed in enumerate(self.lists) if listed}
        lanes = np.array(list(tails), np.int64)
        ends = np.array([len(self.lists[lane]) for lane in tails], np.int64)
        openers = frozenset(tails)
        for row in {self.now[lane][SEEN] for lane in tails}:
            openers &= self.clocks.missing(row, lanes, ends)
        for lane in sorted(openers):
            self.drafts[tails[lane]].signals += self.s.barriers
        self.s.counter_list[ITERATION_BARRIER].step = len(openers)

    def _open_at_the_end(self) -> None:
        last, run = len(self.drafts) - 1, next(reversed(self.runs.values()))
        mine = int(run.lanes[-1])
        tails = [
            indices[-1]
            for lane, indices in enumerate(self.lists)
            if indices
            and lane != mine
            and self.clocks.missing(
                run.clocks[-1][SEEN], np.array([lane]), np.array([len(indices)])
            )
        ]
        draft = self.drafts[last]
        if tails:
            number = len(self.sets)
            self.sets.append(
                _Set(next(reversed(self.runs)), np.array(tails), NOTHING, NOTHING, NOBODY)
            )
            draft.waits[self._counter(number)] = len(tails)
        draft.signals += self.s.barriers
