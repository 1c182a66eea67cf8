"""Second part of the verifier: what is certainly complete when a task starts.

A phase is executed abstractly, on all ranks at once: a task runs when the one before it on its
processor has run and its waits are met. Counters only grow, so if any execution comes to an end
this one does, and if it stops, every execution stops (no deadlock is missed, none is invented). A
wait for all of a counter's signals orders the task behind every one who signals; a lower threshold
lets an iteration start on any subset and orders nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from ark.ir.dtype import by_name
from ark.plan.access import Region, regions
from ark.plan.types import GATE, Task
from ark.plan.verify.structure import Fleet, refuse, tasks_of

Key = tuple[int, int]


@dataclass
class Node:
    """A task of one rank in the phase. lane: its processor, counted over all ranks."""

    rank: int
    lane: int
    position: int
    task: Task


@dataclass
class Order:
    """clocks[i, l]: how many tasks of lane l are complete before node i starts."""

    number: int
    nodes: list[Node]
    clocks: np.ndarray
    by_op: dict[Key, list[int]]

    def before(self, earlier: np.ndarray, later: np.ndarray) -> np.ndarray:
        """(len(later), len(earlier)) of bool: is the earlier node complete when the later starts."""
        lanes = np.array([self.nodes[i].lane for i in earlier])
        positions = np.array([self.nodes[i].position for i in earlier])
        return self.clocks[later][:, lanes] > positions[None, :]


def op_regions(fleet: Fleet, rank: int, op: int, tasks: list[Task]) -> list[Region]:
    """Regions of an op's operands; their `tasks` index into the given list."""
    plan = fleet.plans[rank]
    accesses = [(i, a) for i, t in enumerate(tasks) for a in fleet.accesses(rank, t)]
    sizes = [8 if t.packet else by_name(t.dtype).itemsize for t in plan.tensors]
    return regions(plan.tensors, plan.buffers, sizes, plan.ops[op].operands, accesses)


def order_phase(fleet: Fleet, number: int) -> Order:
    """Orders the phase; PlanError if counters do not add up or the execution stops."""
    nodes: list[Node] = []
    lanes: list[list[int]] = []
    by_op: dict[Key, list[int]] = defaultdict(list)
    base = 0
    for rank, plan in enumerate(fleet.plans):
        phase = plan.phases[number]
        lanes += [[] for _ in phase.processors]
        for processor, position, task in tasks_of(phase):
            by_op[rank, task.op].append(len(nodes))
            lanes[base + processor].append(len(nodes))
            nodes.append(Node(rank, base + processor, position, task))
        base += len(phase.processors)
    signallers = _signallers(fleet, nodes)
    _check_steps(fleet, number, nodes, signallers)
    feeds = _packet_feeds(fleet, nodes, by_op)
    clocks = _run(fleet, nodes, lanes, signallers, feeds)
    order = Order(number, nodes, clocks, dict(by_op))
    _check_gate(fleet, order, lanes, signallers)
    return order


def _signallers(fleet: Fleet, nodes: list[Node]) -> dict[Key, list[int]]:
    found: dict[Key, list[int]] = defaultdict(list)
    for i, node in enumerate(nodes):
        for counter in node.task.signals:
            found[fleet.counter_of(node.rank, counter)].append(i)
    return found


def _check_steps(
    fleet: Fleet, number: int, nodes: list[Node], signallers: dict[Key, list[int]]
) -> None:
    awaited = {(n.rank, c): t for n in nodes for c, t in n.task.waits}
    for rank, plan in enumerate(fleet.plans):
        for counter in plan.counters:
            if counter.rank != rank:
                continue
            key = (rank, counter.id)
            many = len(signallers.get(key, ()))
            if counter.id == GATE and many != plan.world_size:
                raise refuse(f"the gate of rank {rank} is signalled {many} times in an iteration")
            if many and many != counter.step:
                raise refuse(
                    f"counter {counter.name!r} of rank {rank} is signalled {many} times in an "
                    f"iteration, but its step is {counter.step}"
                )
            if key in awaited and not many:
                raise refuse(f"counter {counter.name!r} of rank {rank} is awaited, never signalled")
            remote = any(nodes[i].rank != rank for i in signallers.get(key, ()))
            if remote and not counter.system:
                raise refuse(f"counter {counter.name!r} has signals of peers, but device scope")
    for node in nodes:
        for awaited_counter, threshold in node.task.waits:
            step = fleet.plans[node.rank].counters[awaited_counter].step
            if threshold > step:
                raise refuse(
                    f"op {fleet.plans[node.rank].ops[node.task.op].name!r} waits for {threshold} of "
                    f"{step} signals"
                )


def _packet_feeds(
    fleet: Fleet, nodes: list[Node], by_op: dict[Key, list[int]]
) -> dict[int, set[int]]:
    """By node: the nodes whose packets it reads, and therefore waits for."""
    feeds: dict[int, set[int]] = defaultdict(set)
    writes: dict[Key, list[tuple[Region, list[int]]]] = defaultdict(list)
    reads: list[tuple[Key, Region, list[int]]] = []
    for (rank, op), members in sorted(by_op.items()):
        if not any(fleet.plans[rank].tensors[t].packet for t in fleet.plans[rank].ops[op].operands):
            continue
        for region in op_regions(fleet, rank, op, [nodes[i].task for i in members]):
            if not region.packet:
                continue
            key = fleet.buffer_of(rank, region.buffer)
            if region.write:
                writes[key].append((region, members))
            else:
                reads.append((key, region, members))
    for key, region, members in reads:
        for other, producers in writes[key]:
            rows, columns = np.nonzero(region.overlaps(other))
            for row, column in zip(rows, columns, strict=True):
                feeds[members[region.tasks[row]]].add(producers[other.tasks[column]])
    return feeds


def _run(
    fleet: Fleet,
    nodes: list[Node],
    lanes: list[list[int]],
    signallers: dict[Key, list[int]],
    feeds: dict[int, set[int]],
) -> np.ndarray:
    """Executes abstractly; returns the clocks. PlanError names the tasks that never start."""
    clocks = np.zeros((len(nodes), len(lanes)), np.int32)
    ends = np.zeros((len(nodes), len(lanes)), np.int32)
    counts: dict[Key, int] = defaultdict(int)
    joined: dict[Key, np.ndarray] = {}
    sleepers: dict[Key, list[int]] = defaultdict(list)
    fed: dict[int, list[int]] = defaultdict(list)
    for reader, producers in feeds.items():
        for producer in producers:
            fed[producer].append(reader)
    done = np.zeros(len(nodes), bool)
    heads = [0] * len(lanes)
    ready = list(range(len(lanes)))
    while ready:
        lane = ready.pop()
        while heads[lane] < len(lanes[lane]):
            index = lanes[lane][heads[lane]]
            node = nodes[index]
            late = next((p for p in sorted(feeds.get(index, ())) if not done[p]), None)
            if late is not None:
                break
            short = next(
                ((node.rank, c) for c, t in node.task.waits if counts[node.rank, c] < t), None
            )
            if short is not None:
                sleepers[short].append(lane)
                break
            clock = clocks[index]
            if heads[lane]:
                np.maximum(clock, ends[lanes[lane][heads[lane] - 1]], out=clock)
            for counter, threshold in node.task.waits:
                key = (node.rank, counter)
                if threshold == len(signallers[key]):
                    np.maximum(clock, joined[key], out=clock)
            for producer in feeds.get(index, ()):
                np.maximum(clock, ends[producer], out=clock)
            end = ends[index]
            np.copyto(end, clock)
            end[lane] = node.position + 1
            done[index] = True
            heads[lane] += 1
            for counter in node.task.signals:
                key = fleet.counter_of(node.rank, counter)
                counts[key] += 1
                if key in joined:
                    np.maximum(joined[key], end, out=joined[key])
                else:
                    joined[key] = end.copy()
                ready += sleepers.pop(key, [])
            ready += [nodes[r].lane for r in fed.get(index, ())]
    if not done.all():
        stuck = nodes[int(np.flatnonzero(~done)[0])]
        op = fleet.plans[stuck.rank].ops[stuck.task.op]
        raise refuse(
            f"its waits cannot all be met: {int((~done).sum())} tasks never start, the first is "
            f"tile {list(stuck.task.coord)} of op {op.name!r} on rank {stuck.rank}"
        )
    return clocks


def _check_gate(
    fleet: Fleet, order: Order, lanes: list[list[int]], signallers: dict[Key, list[int]]
) -> None:
    """Whoever opens the gate must come after everything its rank does in the iteration."""
    base = 0
    for rank, plan in enumerate(fleet.plans):
        mine = [i for i in signallers[rank, GATE] if order.nodes[i].rank == rank]
        for other in range(len(fleet.plans)):
            if sum(order.nodes[i].rank == rank for i in signallers[other, GATE]) != 1:
                raise refuse(f"rank {rank} must signal the gate of rank {other} once an iteration")
        node = order.nodes[mine[0]]
        for lane in range(base, base + plan.processors):
            complete = order.clocks[mine[0], lane] + (lane == node.lane)
            if complete < len(lanes[lane]):
                raise refuse(f"the gate of rank {rank} opens before its iteration is complete")
        base += plan.processors
