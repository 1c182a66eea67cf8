"""The cost model: a predicted timeline of one iteration, to draw beside the measured one.

A task takes the longer of its arithmetic at the processor's share of the machine's rate and its
bytes at the share of the bandwidth, and a hand-over takes the machine's signal time. Coarse on
purpose: it ranks schedules and shows gaps, it does not promise microseconds. Called by `ark trace`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ark.plan import kind as kinds
from ark.plan.serialize import machine_of
from ark.plan.types import Plan, Task

TASK_US = 0.3  # fetching a record, dispatching a body


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
    flops_per_us = machine.tflops * 1e6 / machine.processors
    bytes_per_us = machine.bandwidth_gbps * 1e3 / machine.processors
    signatures = [kinds.signature(plan, op) for op in plan.ops]
    left: dict[int, int] = defaultdict(int)
    for tasks in plan.phases[phase].processors:
        for task in tasks:
            for counter in task.signals:
                if plan.counters[counter].rank == plan.rank:
                    left[counter] += 1
    ready: dict[int, float] = defaultdict(float)
    clock = [0.0] * plan.processors
    heads = [0] * plan.processors
    spans: list[Span] = []
    moved = True
    while moved:
        moved = False
        for processor, tasks in enumerate(plan.phases[phase].processors):
            while heads[processor] < len(tasks):
                task = tasks[heads[processor]]
                if any(left[c] > 0 for c, _ in task.waits):
                    break
                begin = max([clock[processor], *(ready[c] for c, _ in task.waits)])
                op = plan.ops[task.op]
                flops, moves = kinds.get(op.kind).cost(signatures[task.op], task.coord)
                end = begin + TASK_US + max(flops / flops_per_us, moves / bytes_per_us)
                spans.append(Span(processor, heads[processor], task, begin, end))
                clock[processor] = end
                heads[processor] += 1
                for counter in task.signals:
                    left[counter] -= 1
                    ready[counter] = max(ready[counter], end + machine.signal_us)
                moved = True
    return spans
