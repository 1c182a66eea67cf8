"""Second part of the verifier: what is certainly complete when a task starts.

A phase is executed abstractly, on all ranks at once: a task runs when the one before it on its
processor has run and its waits are met. Counters only grow, so if any execution comes to an end
this one does, and if it stops, every execution stops (no deadlock is missed, none is invented). A
wait for all of a counter's signals orders the task behind every one who signals; a lower threshold
lets an iteration start on any subset and orders nothing.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from ark.ir.dtype import by_name
from ark.plan.access import Region, regions
from ark.plan.types import GATE, Task
from ark.plan.verify.structure import RankSet, refuse, tasks_of

Key = tuple[int, int]
RAN, SEEN = 0, 1  # rows of a clock


@dataclass
class Node:
    """A task of one rank in the phase. lane: its processor, counted over all ranks."""

    rank: int
    lane: int
    position: int
    task: Task


@dataclass
class Order:
    """clocks[i, RAN, l]: how many tasks of lane l have run before node i starts; clocks[i, SEEN,
    l]: of how many it sees what they wrote. A packet proves that its producer ran, but brings no
    other memory along; a counter does both.
    """

    number: int
    nodes: list[Node]
    clocks: np.ndarray
    by_op: dict[Key, list[int]]

    def before(self, earlier: np.ndarray, later: np.ndarray, which: int) -> np.ndarray:
        """(len(later), len(earlier)) of bool: has the earlier node run, or is it seen, by then?"""
        lanes = np.array([self.nodes[i].lane for i in earlier])
        positions = np.array([self.nodes[i].position for i in earlier])
        return self.clocks[later, which][:, lanes] > positions[None, :]


def op_regions(rank_set: RankSet, rank: int, op: int, tasks: list[Task]) -> list[Region]:
    """Regions of an op's operands; their `tasks` index into the given list."""
    plan = rank_set.plans[rank]
    accesses = [(i, a) for i, t in enumerate(tasks) for a in rank_set.accesses(rank, t)]
    sizes = [8 if t.packet else by_name(t.dtype).itemsize for t in plan.tensors]
    return regions(plan.tensors, plan.buffers, sizes, plan.ops[op].operands, accesses)


def order_phase(rank_set: RankSet, number: int) -> Order:
    """Orders the phase; PlanError if counters do not add up or the execution stops."""
    nodes: list[Node] = []
    lanes: list[list[int]] = []
    by_op: dict[Key, list[int]] = defaultdict(list)
    base = 0
    for rank, plan in enumerate(rank_set.plans):
        phase = plan.phases[number]
        lanes += [[] for _ in phase.processors]
        for processor, position, task in tasks_of(phase):
            by_op[rank, task.op].append(len(nodes))
            lanes[base + processor].append(len(nodes))
            nodes.append(Node(rank, base + processor, position, task))
        base += len(phase.processors)
    signallers = _signallers(rank_set, nodes)
    _check_steps(rank_set, number, nodes, signallers)
    groups = _packet_groups(rank_set, nodes, by_op)
    clocks = _run(rank_set, nodes, lanes, signallers, groups)
    order = Order(number, nodes, clocks, dict(by_op))
    _check_gate(rank_set, order, lanes, signallers)
    return order


def _signallers(rank_set: RankSet, nodes: list[Node]) -> dict[Key, list[int]]:
    found: dict[Key, list[int]] = defaultdict(list)
    for i, node in enumerate(nodes):
        for counter in node.task.signals:
            found[rank_set.counter_of(node.rank, counter)].append(i)
    return found


def _check_steps(
    rank_set: RankSet, number: int, nodes: list[Node], signallers: dict[Key, list[int]]
) -> None:
    awaited = {(n.rank, c): t for n in nodes for c, t in n.task.waits}
    for rank, plan in enumerate(rank_set.plans):
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
            step = rank_set.plans[node.rank].counters[awaited_counter].step
            if threshold > step:
                name = rank_set.plans[node.rank].ops[node.task.op].name
                raise refuse(f"op {name!r} waits for {threshold} of {step} signals")


def _packet_groups(
    rank_set: RankSet, nodes: list[Node], by_op: dict[Key, list[int]]
) -> list[tuple[list[int], list[int]]]:
    """(producers, readers) of packets: each reader waits for all of its group's producers."""
    writes: dict[Key, list[tuple[Region, list[int]]]] = defaultdict(list)
    reads: list[tuple[Key, Region, list[int]]] = []
    for (rank, op), members in sorted(by_op.items()):
        if not any(
            rank_set.plans[rank].tensors[t].packet for t in rank_set.plans[rank].ops[op].operands
        ):
            continue
        for region in op_regions(rank_set, rank, op, [nodes[i].task for i in members]):
            if not region.packet:
                continue
            key = rank_set.buffer_of(rank, region.buffer)
            if region.write:
                writes[key].append((region, members))
            else:
                reads.append((key, region, members))
    groups = []
    for key, region, members in reads:
        for other, producers in writes[key]:
            hits = region.overlaps(other)
            rows, which = np.unique(hits, axis=0, return_inverse=True)
            for number, row in enumerate(rows):
                if row.any():
                    readers = np.flatnonzero(which.reshape(-1) == number)
                    groups.append(
                        (
                            [producers[t] for t in other.tasks[row]],
                            [members[t] for t in region.tasks[readers]],
                        )
                    )
    return groups


@dataclass
class _Event:
    """A counter or a group of packets while the phase is executed."""

    packet: bool
    total: int
    count: int = 0
    clock: np.ndarray | None = None
    waiting: list[tuple[int, int]] = field(default_factory=list)  # (threshold, node), falling

    def signal(self, end: np.ndarray) -> list[int]:
        """Counts one signal; returns the nodes whose wait it meets."""
        self.count += 1
        if self.clock is None:
            self.clock = end.copy()
        else:
            np.maximum(self.clock, end, out=self.clock)
        met = []
        while self.waiting and self.waiting[-1][0] <= self.count:
            met.append(self.waiting.pop()[1])
        return met


def _run(
    rank_set: RankSet,
    nodes: list[Node],
    lanes: list[list[int]],
    signallers: dict[Key, list[int]],
    groups: list[tuple[list[int], list[int]]],
) -> np.ndarray:
    """Executes abstractly; returns the clocks. PlanError names the tasks that never start."""
    clocks = np.zeros((len(nodes), 2, len(lanes)), np.int32)
    waits: list[list[tuple[_Event, int]]] = [[] for _ in nodes]
    signals: list[list[_Event]] = [[] for _ in nodes]
    events = {key: _Event(False, len(members)) for key, members in signallers.items()}
    for key, members in signallers.items():
        for member in members:
            signals[member].append(events[key])
    for i, node in enumerate(nodes):
        for counter, threshold in node.task.waits:
            waits[i].append((events[node.rank, counter], threshold))
    for producers, readers in groups:
        event = _Event(True, len(producers))
        for producer in producers:
            signals[producer].append(event)
        for reader in readers:
            waits[reader].append((event, event.total))
    pending = [len(w) for w in waits]
    for i, needed in enumerate(waits):
        for event, threshold in needed:
            event.waiting.append((threshold, i))
    for event in {id(e): e for needed in waits for e, _ in needed}.values():
        event.waiting.sort(reverse=True)
    following: list[int | None] = [None] * len(nodes)
    for lane in lanes:
        for before, after in itertools.pairwise(lane):
            following[before] = after
            pending[after] += 1
    ready = [lane[0] for lane in lanes if lane and not pending[lane[0]]]
    done = 0
    while ready:
        index = ready.pop()
        node = nodes[index]
        clock = clocks[index]
        for event, threshold in waits[index]:
            if threshold == event.total and event.clock is not None:
                if event.packet:
                    np.maximum(clock[RAN], event.clock[RAN], out=clock[RAN])
                else:
                    np.maximum(clock, event.clock, out=clock)
        end = clock.copy()
        end[:, node.lane] = node.position + 1
        done += 1
        for event in signals[index]:
            for met in event.signal(end):
                pending[met] -= 1
                if not pending[met]:
                    ready.append(met)
        later = following[index]
        if later is not None:
            np.maximum(clocks[later], end, out=clocks[later])
            pending[later] -= 1
            if not pending[later]:
                ready.append(later)
    if done < len(nodes):
        stuck = nodes[next(i for i, needed in enumerate(pending) if needed)]
        op = rank_set.plans[stuck.rank].ops[stuck.task.op]
        raise refuse(
            f"its waits cannot all be met: {len(nodes) - done} tasks never start, the first is "
            f"tile {list(stuck.task.coord)} of op {op.name!r} on rank {stuck.rank}"
        )
    return clocks


def _check_gate(
    rank_set: RankSet, order: Order, lanes: list[list[int]], signallers: dict[Key, list[int]]
) -> None:
    """Whoever opens the gate must come after everything its rank does in the iteration."""
    base = 0
    for rank, plan in enumerate(rank_set.plans):
        mine = [i for i in signallers[rank, GATE] if order.nodes[i].rank == rank]
        for other in range(len(rank_set.plans)):
            if sum(order.nodes[i].rank == rank for i in signallers[other, GATE]) != 1:
                raise refuse(f"rank {rank} must signal the gate of rank {other} once an iteration")
        node = order.nodes[mine[0]]
        for lane in range(base, base + plan.processors):
            complete = order.clocks[mine[0], SEEN, lane] + (lane == node.lane)
            if complete < len(lanes[lane]):
                raise refuse(f"the gate of rank {rank} opens before its iteration is complete")
        base += plan.processors
