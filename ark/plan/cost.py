"""The cost model: a predicted timeline of one iteration, to draw beside the measured one.

A task takes the longer of its arithmetic at the processor's share of the machine's rate and its
bytes at the share of the bandwidth, and a hand-over takes the machine's signal time, by counter or
by packets. Coarse on purpose: it shows order and gaps, it does not promise microseconds. Called by
`ark trace`, and by ark.interop, which asks how many processors a graph can busy; no decision of the
planner depends on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ark.machine import Machine
from ark.plan import kind as kinds
from ark.plan.access import Region, region
from ark.plan.boxes import Templates
from ark.plan.serialize import machine_of
from ark.plan.types import Plan, Task

TASK_US = 0.3  # fetching a record, dispatching a body
EACH_US = 300.0  # of predicted work that a thread of a CPU has at least, for `busied`
Place = tuple[int, int]  # processor, position


@dataclass(frozen=True)
class Span:
    """When a task is predicted to run, in microseconds from the phase's start."""

    processor: int
    position: int
    task: Task
    begin: float
    end: float


def predict(plan: Plan, phase: int) -> list[Span]:
    """The predicted timeline of one phase, by processor and position. Peers count as instant."""
    machine = machine_of(plan)
    takes = _takes(plan, machine)
    waits, signals = _waits_and_signals(plan, phase)
    left: dict[Hashable, int] = defaultdict(int)
    for events in signals.values():
        for event in events:
            left[event] += 1
    ready: dict[Hashable, float] = defaultdict(float)
    waiting: dict[Hashable, list[int]] = defaultdict(list)
    lists = plan.phases[phase].processors
    clock = [0.0] * len(lists)
    heads = [0] * len(lists)
    spans: list[Span] = []
    able = list(range(len(lists)))
    while able:
        processor = able.pop()
        while heads[processor] < len(lists[processor]):
            place = (processor, heads[processor])
            task = lists[processor][heads[processor]]
            missing = next((event for event in waits[place] if left[event] > 0), None)
            if missing is not None:
                waiting[missing].append(processor)
                break
            begin = max([clock[processor], *(ready[event] for event in waits[place])])
            end = begin + takes(task)
            spans.append(Span(*place, task, begin, end))
            clock[processor] = end
            heads[processor] += 1
            for event in signals[place]:
                left[event] -= 1
                ready[event] = max(ready[event], end + machine.costs.signal_us)
                if not left[event]:
                    able += waiting.pop(event, ())
    return sorted(spans, key=lambda span: (span.processor, span.position))


def work(plan: Plan, phase: int) -> float:
    """Microseconds that all tasks of one iteration take, one behind the other."""
    takes = _takes(plan, machine_of(plan))
    return sum(takes(task) for tasks in plan.phases[phase].processors for task in tasks)


def busied(plan: Plan, machine: Machine) -> int:
    """How many of the machine's processors the plan's one phase is worth: one that is a thread is
    started by each launch, and spins where it waits.
    """
    if not machine.has("single_thread"):
        return machine.processors
    return min(machine.processors, max(1, int(work(plan, 0) / EACH_US)))


def _takes(plan: Plan, machine: Machine) -> Callable[[Task], float]:
    """A function that says how many microseconds a processor of the machine takes for a task."""
    flops_per_us = machine.tflops * 1e6 / machine.processors
    bytes_per_us = machine.bandwidth_gbps * 1e3 / machine.processors
    signatures = [kinds.signature(plan, op) for op in plan.ops]
    made = [kinds.get(op.kind) for op in plan.ops]

    def takes(task: Task) -> float:
        flops, moves = made[task.op].cost(signatures[task.op], task.coord)
        return TASK_US + max(flops / flops_per_us, moves / bytes_per_us)

    return takes


def _waits_and_signals(
    plan: Plan, phase: int
) -> tuple[dict[Place, list[Hashable]], dict[Place, list[Hashable]]]:
    """What each task waits for and what it signals: own counters by id, and sets of packets."""
    waits: dict[Place, list[Hashable]] = defaultdict(list)
    signals: dict[Place, list[Hashable]] = defaultdict(list)
    by_op: dict[int, list[tuple[tuple[int, ...], Place]]] = defaultdict(list)
    for processor, tasks in enumerate(plan.phases[phase].processors):
        for position, task in enumerate(tasks):
            place = (processor, position)
            by_op[task.op].append((task.coord, place))
            waits[place] += [counter for counter, _ in task.waits]
            signals[place] += [c for c in task.signals if plan.counters[c].rank == plan.rank]
    templates = Templates()
    readers: list[Region] = []
    writers: dict[Hashable, list[Region]] = defaultdict(list)
    for op, listed in by_op.items():
        listed.sort()
        entry = plan.ops[op]
        if not any(plan.tensors[t].packet for t in entry.operands):
            continue
        coords = tuple(coord for coord, _ in listed)
        for boxes in templates.boxes(kinds.signature(plan, entry), coords):
            tensor = plan.tensors[entry.operands[boxes.operand]]
            touched = region(op, boxes, tensor, plan.buffers[tensor.buffer])
            if tensor.packet:
                (writers[tensor.buffer] if boxes.write else readers).append(touched)
    for reader in readers:
        members, starts = reader.boxes.by_box
        for writer in writers[reader.memory]:
            known: dict[bytes, Hashable] = {}
            for box, producers, key in reader.tasks_met(writer):
                event = known.get(key)
                if event is None:
                    event = known[key] = (reader.op, writer.op, reader.boxes.operand, len(known))
                    for producer in producers.tolist():
                        signals[by_op[writer.op][producer][1]].append(event)
                for member in members[starts[box] : starts[box + 1]].tolist():
                    waits[by_op[reader.op][member][1]].append(event)
    return waits, signals
