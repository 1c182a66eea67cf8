"""The scheduler: assigns each task to a processor and adds the waits and signals of tasks. Called
by ark.lower.pipeline.

Tasks are assigned to processors in program order. ark.plan.ordering determines the earlier tasks
for which each task must wait. Tasks that wait for the same set of tasks share one counter. So do
tasks that wait for the same sets of several ops, if this saves more waits than it adds signals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ark.machine import Machine
from ark.machine.variant import COMMUNICATE
from ark.plan import kind as kinds
from ark.plan.access import Region, region
from ark.plan.boxes import Templates
from ark.plan.clocks import START_ROW
from ark.plan.groups import Group
from ark.plan.kind import OperandType, Signature
from ark.plan.ordering import JOINT_SETS, Decision, Needs, OpRun, Ordering
from ark.plan.types import ITERATION_BARRIER, PlanBuffer, PlanCounter, PlanOp, PlanTensor, Task

Waits = tuple[tuple[int, int], ...]  # counters and thresholds


@dataclass
class _Counter:
    name: str
    step: int
    rank: int
    system: bool


class Schedule:
    """Builds the task lists of one rank's plan, phase by phase. Counters are numbered across all
    phases.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        tensors: Sequence[PlanTensor],
        buffers: Sequence[PlanBuffer],
        rank: int,
        world_size: int,
        templates: Templates,
        barrier_step: int,
        ended: bool = False,
        phases: int = 1,
    ) -> None:
        """machines: one machine model for each phase. barrier_step: the number of signals that open
        an iteration on this rank. It is the number of ranks if every rank signals the end of an
        iteration to all, and 1 if each rank opens its own iterations. ended: True if ranks begin
        iterations independently. Each rank then signals the end of an iteration to its peers, and a
        peer writes to the rank's memory for the next iteration only after this signal. phases: the
        number of phases of the plan.
        """
        self.machines = machines
        self.tensors = tensors
        self.buffers = buffers
        self.rank = rank
        self.templates = templates
        self.only = world_size == 1 and phases == 1
        self.counter_list: list[_Counter] = [
            _Counter("iteration barrier", barrier_step, rank, barrier_step > 1)
        ]
        self._semaphores: dict[tuple[int, str], int] = {}
        self.barriers = [ITERATION_BARRIER] + [
            self.counter("iteration barrier", 0, (rank + step) % world_size, True)
            for step in range(1, barrier_step)
        ]
        # For each phase: `ended` maps a peer to the counter that the peer increments when it has
        # ended an iteration. `peer_counters` lists the counters in peers' memory that this rank
        # increments when it has ended an iteration.
        self.ended: list[dict[int, int]] = [{} for _ in range(phases)]
        self.peer_counters: list[list[int]] = [[] for _ in range(phases)]
        for number in range(phases):
            of = f" of phase {number}" if phases > 1 else ""
            for step in range(1, world_size if ended else 1):
                peer = (rank + step) % world_size
                self.ended[number][peer] = self.counter(f"ended+{step}{of}", 1, rank, True)
                name = f"ended+{world_size - step}{of}"
                self.peer_counters[number].append(self.counter(name, 0, peer, True))

    def counters(self) -> tuple[PlanCounter, ...]:
        return tuple(
            PlanCounter(i, c.name, c.step, c.rank, c.system)
            for i, c in enumerate(self.counter_list)
        )

    def counter(self, name: str, step: int, rank: int, system: bool) -> int:
        self.counter_list.append(_Counter(name, step, rank, system))
        return len(self.counter_list) - 1

    def claimed(self, op: PlanOp) -> PlanOp:
        """The op. If its tasks claim tiles at run time, a counter for that is added to it."""
        tiles = kinds.get(op.kind).claims(self.signature(op))
        if not tiles:
            return op
        return replace(op, claims=self.counter(f"claims of {op.id}", tiles, self.rank, False))

    def phase(
        self, number: int, members: Sequence[tuple[int, Group]], ops: Sequence[PlanOp]
    ) -> tuple[tuple[Task, ...], ...]:
        """Schedules one phase (an entry point of the plan) and returns the task list of each
        processor. members: the tasks of each op.
        """
        run = _PhaseRun(self, number)
        run.alone = self._one_processor(number, members, ops)
        for op, group in members:
            run.add(ops[op], group)
        return run.finish()

    def _one_processor(
        self, number: int, members: Sequence[tuple[int, Group]], ops: Sequence[PlanOp]
    ) -> bool:
        """True if one processor executes the whole phase: every op is one task, and together they
        move so little that a wait for another processor takes longer than a task.
        """
        machine, moved = self.machines[number], 0.0
        if not self.only or machine.variant.role(COMMUNICATE) or len(members) < 2:
            return False
        for op, group in members:
            placed = group.processors or group.granularity is not None or bool(group.placement)
            if placed or group.sends or group.awaits or len(group.coords) != 1:
                return False
            sig = self.signature(ops[op])
            moved += kinds.get(ops[op].kind).cost(sig, next(iter(group.coords)))[1]
        return moved <= machine.costs.next_bytes

    def unscheduled(
        self, members: Sequence[tuple[int, Group]], ops: Sequence[PlanOp]
    ) -> tuple[Task, ...]:
        """The tasks of a phase in program order, without waits and signals."""
        tasks: list[Task] = []
        for op, group in members:
            coords = tuple(group.coords)
            streams = self.templates.streams(self.signature(ops[op]), coords)
            pairs = zip(coords, streams, strict=True)
            tasks += (Task(op, coord, fetches=fetches) for coord, fetches in pairs)
        return tuple(tasks)

    def semaphore(self, rank: int, name: str, step: int) -> int:
        """The number of the counter with the given name on a rank. The counter is added if it does
        not exist. step: the number of signals that the counter gets per iteration; an existing
        counter keeps its step if that is larger.
        """
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
        self.machine = schedule.machines[number]
        lists = self.machine.lists
        self.lists: list[list[int]] = [[] for _ in range(lists)]
        self.order = Ordering(lists)
        self.now = [START_ROW] * lists  # the clock with which each list's next task starts
        self.rotation = 0
        self.alone = False  # True if the first processor executes all tasks
        self.groups: list[tuple[PlanOp, Group, Signature]] = []
        self.waits: list[Waits] = []  # by task
        self.signals: list[list[int]] = []
        self.set_counters: dict[tuple[int, ...], int] = {}  # by the numbers of the sets
        self.met: set[tuple[int, int]] = set()  # (processor, peer): waits for the peer's end

    def add(self, op: PlanOp, group: Group) -> None:
        """Assigns the tasks of an op to processors, and adds the waits of each task."""
        first, count = len(self.waits), len(group.coords)
        sig = self.s.signature(op)
        self.groups.append((op, group, sig))
        self.waits += [()] * count
        self.signals += [[] for _ in range(count)]
        mine = self._regions(op, sig, tuple(group.coords))
        needs = self.order.needs(mine, count)
        processors = np.zeros(count, np.int64) if self.alone else self._follow(group, needs)
        if processors is None:
            processors = self._deal(group, count)
        run = OpRun(first, processors, np.zeros(count, np.int64), [])
        self.order.begin(op.id, run)
        decisions: dict[tuple[int, Needs], Decision] = {}
        decided: list[tuple[int, tuple[int, ...]]] = []  # tasks with waits, and the sets
        for i, processor in enumerate(processors.tolist()):
            clock, needed = self.now[processor], needs[i]
            if needed is not None:
                decision = decisions.get((clock, needed))
                if decision is None:
                    decision = decisions[clock, needed] = self.order.decide(clock, needed, -1)
                if processor in decision.special:
                    decision = self.order.decide(clock, needed, processor)
                decided.append((first + i, decision.waits))
                clock = self.now[processor] = decision.clock
            self.lists[processor].append(first + i)
            run.ends[i] = len(self.lists[processor])
            run.clocks.append(clock)
        waiting = Counter(sets for _, sets in decided)
        counters = {sets: self._counters(sets, many) for sets, many in waiting.items()}
        for task, sets in decided:
            self.waits[task] = counters[sets]
        self._pair(group, first)
        self._hold_back(mine, run)
        self.order.frontier.add(mine)

    def _counters(self, sets: tuple[int, ...], tasks: int) -> Waits:
        """The waits of a task, as (counter, threshold). sets: the numbers of the sets of tasks for
        which it must wait. tasks: the number of tasks with the same waits.
        """
        many = sum(len(self.order.sets[n].members) for n in sets)
        if len(sets) >= JOINT_SETS and tasks * (len(sets) - 1) >= many:
            return ((self._counter(sets), many),)
        pairs = [(self._counter((n,)), len(self.order.sets[n].members)) for n in sets]
        return tuple(sorted(pairs))

    def _follow(self, group: Group, needs: Sequence[Needs | None]) -> np.ndarray | None:
        """For each task, the processor that has just run a task on which it depends. On this
        processor the task needs no wait, so a chain of small ops runs without synchronisation. None
        if some task does not have such a processor, or if two tasks have the same one.
        """
        asked = group.processors or group.granularity is not None or bool(group.placement)
        placed = asked or bool(group.sends) or bool(group.awaits)
        if placed or len(needs) > len(self.lists) or self.machine.variant.role(COMMUNICATE):
            return None
        processors: list[int] = []
        for need in needs:
            processor = self._behind(need) if need else None
            if processor is None or processor in processors:
                return None
            processors.append(processor)
        return np.array(processors, np.int64)

    def _behind(self, need: Needs) -> int | None:
        """A processor on which a task needs no wait, or None if there is none. On this processor,
        the last task so far must be one on which the new task depends. That task's vector clock
        must state that all others on which the new task depends are complete. need: the sets on
        which the new task depends.
        """
        for number in reversed(need.sets):
            needed = self.order.sets[number]
            for processor, end in zip(
                needed.processors.tolist(), needed.ends.tolist(), strict=True
            ):
                if processor >= self.machine.processors or len(self.lists[processor]) != end:
                    continue
                if not self.order.waits(self.now[processor], need, processor):
                    return int(processor)
        return None

    def _deal(self, group: Group, count: int) -> np.ndarray:
        """The processor of each task. If the lowering chose the processors, these are used.
        Otherwise tasks are distributed round robin. If the group sets `granularity`, a processor
        gets that many consecutive tasks at a time. If there are more tasks than processors, each
        processor gets one range of consecutive tasks.
        """
        if group.placement:
            return np.array(group.placement, np.int64)
        begin, end = group.processors or (0, self.machine.processors)
        available = end - begin
        share = np.arange(count, dtype=np.int64)
        if group.granularity is not None:
            processors: np.ndarray = begin + share // group.granularity % available
            return processors
        if count > available:
            share = share * available // count
        processors = begin + (self.rotation + share) % available
        self.rotation = (self.rotation + count) % self.machine.processors
        return processors

    def _pair(self, group: Group, first: int) -> None:
        """Adds to the tasks the waits and signals between ranks that the lowering stored in the
        group. first: the number of the group's first task.
        """
        for i, awaited in enumerate(group.awaits):
            far = ((self.s.semaphore(a.rank, a.name, max(n, 1)), n) for a, n in awaited)
            self.waits[first + i] = tuple(sorted((*self.waits[first + i], *far)))
        for i, sent in enumerate(group.sends):
            self.signals[first + i] += (self.s.semaphore(a.rank, a.name, 0) for a in sent)

    def _hold_back(self, mine: Sequence[Region], run: OpRun) -> None:
        """Keeps this rank from overwriting data that a peer still uses in its previous iteration.
        On each processor, the first task that writes to a peer gets a wait for the end of the
        peer's previous iteration. Tasks that already wait for the previous iteration get no further
        wait.
        """
        for touched in (r for r in mine if r.write):
            peer = self.s.buffers[int(touched.memory)].rank  # type: ignore[call-overload]
            if peer not in self.s.ended[self.number]:
                continue
            for task in sorted(set(touched.boxes.tasks.tolist())):
                processor, number = int(run.processors[task]), run.first + task
                lags = any(threshold == 0 for _, threshold in self.waits[number])
                if not lags and (processor, peer) not in self.met:
                    self.met.add((processor, peer))
                    wait = self.s.ended[self.number][peer], 0
                    self.waits[number] = tuple(sorted((*self.waits[number], wait)))

    def _regions(
        self, op: PlanOp, sig: Signature, coords: tuple[tuple[int, ...], ...]
    ) -> list[Region]:
        regions = []
        for boxes in self.s.templates.boxes(sig, coords):
            tensor = self.s.tensors[op.operands[boxes.operand]]
            regions.append(region(op.id, boxes, tensor, self.s.buffers[tensor.buffer]))
        for number in op.after:  # treated as reads of whole tensors, so the op waits for writers
            tensor = self.s.tensors[number]
            boxes = self.s.templates.whole(tensor.items, tensor.itemsize, len(coords))
            regions.append(region(op.id, boxes, tensor, self.s.buffers[tensor.buffer], True))
        return regions

    def _counter(self, numbers: tuple[int, ...]) -> int:
        """The number of the counter that all tasks of some sets signal when they end. The counter
        is added if it does not exist. numbers: the numbers of the sets.
        """
        counter = self.set_counters.get(numbers)
        if counter is None:
            members = np.concatenate([self.order.sets[n].members for n in numbers])
            name = f"{self.number}.{self.order.sets[numbers[0]].op}.{len(self.set_counters)}"
            counter = self.s.counter(name, len(members), self.s.rank, False)
            self.set_counters[numbers] = counter
            for member in members.tolist():
                self.signals[member].append(counter)
        return counter

    def finish(self) -> tuple[tuple[Task, ...], ...]:
        """Adds the signals of the iteration barrier to the last tasks, and returns the task list of
        each processor.
        """
        self._barrier()
        tasks: list[Task] = []
        for op, group, sig in self.groups:
            coords = tuple(group.coords)
            for coord, fetches in zip(coords, self.s.templates.streams(sig, coords), strict=True):
                waits, signals = self.waits[len(tasks)], self.signals[len(tasks)]
                tasks.append(Task(op.id, coord, waits, tuple(sorted(signals)), fetches))
        return tuple(tuple(tasks[i] for i in indices) for indices in self.lists)

    def _barrier(self) -> None:
        """Adds the signals that open the next iteration after all tasks of this one.

        In a plan of one rank and one phase, several tasks signal the iteration barrier: the last
        task of each processor, unless the last task of another processor has waited for it. In
        other plans only the phase's last task signals it, after it has waited for the last task of
        every processor. Every rank then sends exactly one signal in every phase.
        """
        if self.s.only:
            self._open_by_all_tails()
        else:
            self._open_by_last_task()

    def _open_by_all_tails(self) -> None:
        tails = {processor: listed[-1] for processor, listed in enumerate(self.lists) if listed}
        processors = np.array(list(tails), np.int64)
        ends = np.array([len(self.lists[processor]) for processor in tails], np.int64)
        openers = frozenset(tails)
        for row in {self.now[processor] for processor in tails}:
            openers &= self.order.clocks.missing(row, processors, ends)
        for processor in sorted(openers):
            self.signals[tails[processor]] += self.s.barriers
        self.s.counter_list[ITERATION_BARRIER].step = len(openers)

    def _open_by_last_task(self) -> None:
        number, run = next(reversed(self.order.runs.items()))
        mine = int(run.processors[-1])
        tails = [
            indices[-1]
            for processor, indices in enumerate(self.lists)
            if indices
            and processor != mine
            and self.order.clocks.missing(
                run.clocks[-1], np.array([processor]), np.array([len(indices)])
            )
        ]
        if tails:
            wait = self._counter((self.order.add_set(number, np.array(tails)),)), len(tails)
            self.waits[-1] = tuple(sorted((*self.waits[-1], wait)))
        self.signals[-1] += [*self.s.barriers, *self.s.peer_counters[self.number]]
