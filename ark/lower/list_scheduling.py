"""Orders the ops of a training step and assigns their tasks to processors, so that processors wait
less. Called by ark.lower.pipeline after lowering.

A processor runs its tasks in list order. In program order, each op of the backward pass waits for
the op before it, and the updates of all parameters come last. With list scheduling (Graham, "Bounds
on Multiprocessing Timing Anomalies", 1969), sums of gradients and updates run while others wait: of
the ops that are predicted to be ready, the one with the longest path to the end of the step comes
next, and each of its tasks goes to the processor that is predicted to begin it first.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ark.machine import Machine
from ark.machine.variant import COMMUNICATE
from ark.plan import kind as kinds
from ark.plan.cost import cache_rate, operations
from ark.plan.groups import Group
from ark.plan.kind import OperandType, Signature

UPDATES = ("elementwise", "fusion")  # the kinds of tasks that update parameters
# An op with more tasks for each processor is divided evenly, so that neighbouring memory is read at
# the same time. So is an op whose tasks claim tiles at run time.
MAX_TASKS_PER_PROCESSOR = 4


def list_scheduled(groups: Sequence[Group], machine: Machine) -> list[Group] | None:
    """The groups of a training step in another order, with the processors of their tasks. None if
    they are not those of a training step, or if the program chose processors.
    """
    if not machine.coalesces or not machine.cooperative or machine.variant.role(COMMUNICATE):
        return None
    if any(g.processors or g.granularity is not None or g.sends or g.awaits for g in groups):
        return None
    if not any(_updates(group, machine) for group in groups):
        return None
    works = [_Work(group) for group in groups]
    known: dict[object, list[float]] = {}
    for work in works:
        key = work.signature.kind, repr(work.signature), tuple(work.group.coords)
        if key not in known:
            known[key] = work.predicted(machine)
        work.times = known[key]
    return _Simulation(works, machine).run()


def _updates(group: Group, machine: Machine) -> bool:
    """True if the op changes a large tensor that persists over iterations."""
    large = [
        t.buffer.id
        for t in group.operands
        if t.buffer.arena != "activation" and t.elements >= machine.costs.little_elements
    ]
    if group.kind not in UPDATES or not large:
        return False
    work = _Work(group)
    return not work.writes.isdisjoint(work.reads & set(large))


class _Work:
    """An op. times: the predicted microseconds of each task. reads, writes: ids of buffers."""

    def __init__(self, group: Group) -> None:
        operands = tuple(OperandType(t.dtype.name, t.shape, t.strides) for t in group.operands)
        self.group = group
        self.signature = Signature(group.kind, group.params.to_plan(), operands)
        accesses = kinds.get(group.kind).accesses(self.signature, group.coords[0])
        written = {a.operand for a in accesses if a.write}
        read = {a.operand for a in accesses if not a.write}
        self.writes = {group.operands[i].buffer.id for i in written}
        self.reads = {group.operands[i].buffer.id for i in read}
        self.reads |= {t.buffer.id for t in group.after}
        self.times: list[float] = []

    def predicted(self, machine: Machine) -> list[float]:
        """The predicted microseconds of each task: as ark.plan.cost computes them for a plan whose
        buffers exceed the last-level cache.
        """
        costs, kind, sig = machine.costs, kinds.get(self.group.kind), self.signature
        active = min(machine.processors, len(self.group.coords))
        near = cache_rate(sig, machine, active)
        far = min(near, machine.bandwidth_gbps * 1e3 / active)
        begins = costs.task_us + costs.pass_us * (kind.rounds(sig, machine) - 1)
        each = [kind.cost(sig, coord) for coord in self.group.coords]
        moved = sum(nbytes for _, nbytes in each)
        share = min(1.0, sum(t.nbytes for t in self.group.operands) / max(1.0, moved))
        rate = 1.0 / (share / far + (1.0 - share) / near)
        scalar = operations(sig, machine)
        return [begins + max(count / scalar, nbytes / rate) for count, nbytes in each]


class _Simulation:
    """Adds ops one after the other. free: for each processor, when its last task is predicted to
    end. begins: for each op whose predecessors have been added, when it is predicted to be ready.
    """

    def __init__(self, works: Sequence[_Work], machine: Machine) -> None:
        self.works, self.machine = works, machine
        self.before = _predecessors(works)
        self.behind: list[list[int]] = [[] for _ in works]
        for i, earlier in enumerate(self.before):
            for j in earlier:
                self.behind[j].append(i)
        signal = machine.costs.signal_us
        self.paths = [0.0] * len(works)  # for each op, microseconds from its begin to the end
        for i in reversed(range(len(works))):
            rest = max((self.paths[j] for j in self.behind[i]), default=0.0)
            spread = sum(works[i].times) / machine.processors
            self.paths[i] = max(*works[i].times, spread) + signal + rest
        self.free = [0.0] * machine.processors
        self.rotation = 0

    def run(self) -> list[Group]:
        """All groups in the new order."""
        signal = self.machine.costs.signal_us
        missing = [len(earlier) for earlier in self.before]
        begins = {i: 0.0 for i, count in enumerate(missing) if not count}
        ends = [0.0] * len(self.works)
        ordered: list[Group] = []
        while begins:
            chosen = self._next(begins)
            group, ends[chosen] = self._add(self.works[chosen], begins.pop(chosen))
            ordered.append(group)
            for i in self.behind[chosen]:
                missing[i] -= 1
                if not missing[i]:
                    begins[i] = max(ends[j] for j in self.before[i]) + signal
        return ordered

    def _next(self, begins: dict[int, float]) -> int:
        """The op to add: of those that are ready when a processor is free, the one with the longest
        path; if there are none, the one that is ready first.
        """
        now = min(self.free)
        ready = [i for i, begin in begins.items() if begin <= now]
        if ready:
            return max(ready, key=lambda i: (self.paths[i], -i))
        return min(begins, key=lambda i: (begins[i], -self.paths[i], i))

    def _add(self, work: _Work, begin: float) -> tuple[Group, float]:
        """Adds the tasks of an op. Returns its group and when its last task is predicted to end."""
        count, processors = len(work.times), self.machine.processors
        claims = kinds.get(work.group.kind).claims(work.signature)
        if claims or count > MAX_TASKS_PER_PROCESSOR * processors:
            dealt = [(self.rotation + i * processors // count) % processors for i in range(count)]
            self.rotation = (self.rotation + count) % processors
            for processor in dict.fromkeys(dealt):
                self.free[processor] = max(self.free[processor], begin)
            for processor, us in zip(dealt, work.times, strict=True):
                self.free[processor] += us
            return replace(work.group, placement=dealt), max(self.free[p] for p in dealt)
        waiting = [(max(free, begin), p) for p, free in enumerate(self.free)]
        heapq.heapify(waiting)
        placement, end = [0] * count, 0.0
        for i in sorted(range(count), key=lambda i: -work.times[i]):
            start, processor = waiting[0]
            placement[i] = processor
            self.free[processor] = start + work.times[i]
            end = max(end, self.free[processor])
            heapq.heapreplace(waiting, (self.free[processor], processor))
        return replace(work.group, placement=placement), end


def _predecessors(works: Iterable[_Work]) -> list[set[int]]:
    """For each op, the earlier ops that it must not overtake, because one of the two writes a
    buffer that the other accesses.
    """
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = defaultdict(list)
    listed: list[set[int]] = []
    for i, work in enumerate(works):
        earlier = {writer[b] for b in work.reads | work.writes if b in writer}
        for buffer in work.writes:
            earlier.update(readers.pop(buffer, ()))
            writer[buffer] = i
        for buffer in work.reads - work.writes:
            readers[buffer].append(i)
        listed.append(earlier)
    return listed
