"""Part of the verifier: determines which tasks are certainly complete when a task starts, and finds
deadlocks.

A phase is executed abstractly (ark.plan.verify.execution). Counters only grow, so a task that can
run stays able to run. If any real execution completes, the abstract one completes too; if the
abstract one stops, every real one stops. So exactly the real deadlocks are reported.

A wait for all signals of a counter orders the waiting task after every task that signals the
counter. A wait for fewer signals may end after any subset of these tasks, so it orders nothing.

Of ranks that do the same work only one is executed. In each step all tasks run that can run, so the
corresponding tasks of the other ranks would run in the same step. Their vector clocks are the same,
with ranks renamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ark.plan.types import ITERATION_BARRIER
from ark.plan.verify.counters import counters_of
from ark.plan.verify.execution import AWAITED, RAN, SEEN, Awaited, Processors, Run
from ark.plan.verify.rank_set import RankSet, refuse


@dataclass(frozen=True, eq=False)
class Order:
    """For each task, the tasks that have certainly run when it starts (relation RAN), and those
    whose writes are visible to it (relation SEEN).

    A wait for a counter proves both relations. A packet makes no other memory visible, and other
    warps of the task that wrote it may still be running. So a packet proves only that all tasks
    before the writer, on the writer's processor, have run. It proves this only to the tasks after
    the reader, on the reader's processor.

    Nodes (tasks) and processors are counted over all ranks. bases: the first node of each rank, and
    one past the last. rows[clock[RAN, i], l]: the number of tasks of processor l that have
    certainly run before node i starts, if i is on another processor; with SEEN, the number whose
    writes are visible to it. home[r]: the number to add to a node of rank r to get the same task of
    the rank that is executed in its place.
    """

    bases: np.ndarray
    rank: np.ndarray
    processor: np.ndarray
    position: np.ndarray
    clock: np.ndarray
    rows: np.ndarray
    home: np.ndarray
    processors: Processors

    def clocks(self, which: np.ndarray | int, nodes: np.ndarray) -> np.ndarray:
        """The vector clocks of nodes (tasks), one row each. A rank that is not executed has the
        clocks of its twin, the rank that is executed in its place.
        """
        return np.asarray(self.clock[which, nodes + self.home[self.rank[nodes]]])

    def known(self, rows: np.ndarray, earlier: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """For each i, True where the vector clock rows[i] states that the task earlier[i] has run.
        rank[i]: the rank of the task to which the clock rows[i] belongs.
        """
        column = self.processor[earlier] + self.processors.moved[rank, self.rank[earlier]]
        return np.asarray(self.rows[rows, column] > self.position[earlier])

    def before(self, earlier: np.ndarray, later: np.ndarray, which: np.ndarray | int) -> np.ndarray:
        """For each pair of nodes, True where the relation `which` is proved: the earlier node has
        run (RAN), its writes are visible (SEEN), or the later one waits for its packets (AWAITED).
        """
        awaited = np.equal(which, AWAITED)
        rows = self.clocks(np.where(awaited, RAN, which), later)
        known = self.known(rows, earlier, self.rank[later]) | awaited
        same_list = (self.processor[earlier] == self.processor[later]) & (
            self.position[earlier] < self.position[later]
        )
        return np.asarray(known | same_list)


def first_nodes(rank_set: RankSet, number: int) -> np.ndarray:
    """The first node of each rank, and one past the last."""
    lists = [rank_set.listing(rank, number) for rank in range(rank_set.world)]
    return np.cumsum([0, *(len(listed.tasks) for listed in lists)])


def order_phase(
    rank_set: RankSet,
    number: int,
    packets: Sequence[Awaited],
) -> Order:
    """The order of the phase. Raises PlanError if counters do not match their signals or the
    execution stops.
    """
    lists = [rank_set.listing(rank, number) for rank in range(rank_set.world)]
    counts = np.array([len(listed.tasks) for listed in lists])
    bases = first_nodes(rank_set, number)
    processors = Processors.of(rank_set, [len(listed.lengths) for listed in lists])
    checked = list(rank_set.checked)
    firsts = np.cumsum([0, *counts[checked]])
    first = dict(zip(checked, firsts.tolist(), strict=False))
    rank = np.repeat(np.arange(rank_set.world), counts)
    processor = np.concatenate(
        [x.processor + at for x, at in zip(lists, processors.starts[:-1], strict=True)]
    )
    position = np.concatenate([x.position for x in lists])
    executed = np.concatenate([np.arange(bases[r], bases[r + 1]) for r in checked])
    counters = counters_of(rank_set, number)
    counters.check(rank_set)
    run = Run(
        processor[executed],
        position[executed],
        np.concatenate([x.lengths for x in lists]),
        processors,
    )
    run.add_counters(counters)
    first_of = np.array([first[t] for t in rank_set.symmetry.twin])
    run.add_packets(packets, lambda rank, nodes: first_of[rank] + nodes)
    stuck = run.execute()
    if stuck is not None:
        count, node = stuck
        at = checked[int(np.searchsorted(firsts, node, "right")) - 1]
        task = lists[at].tasks[node - first[at]]
        raise refuse(
            f"its waits deadlock: {count} tasks never start, the first is tile "
            f"{list(task.coord)} of op {rank_set.plan(at).ops[task.op].name!r} on rank {at}"
        )
    home = first_of - bases[:-1]
    order = Order(
        bases, rank, processor, position, run.clock, run.rows[: run.known], home, processors
    )
    for at in checked:
        _check_barrier(rank_set, order, number, at)
    return order


def _check_barrier(rank_set: RankSet, order: Order, number: int, rank: int) -> None:
    """Raises PlanError unless the tasks that open the iteration barrier run after all other tasks
    of their rank.
    """
    first = int(order.bases[rank])
    barrier_step = rank_set.plan(rank).counters[ITERATION_BARRIER].step
    others = range(rank_set.world) if barrier_step > 1 else (rank,)
    several = rank_set.world == 1  # several tasks may open the barrier of a single rank
    openers: dict[int, list[int]] = {other: [] for other in others}
    named = [rank_set.counter_of(rank, c.id) for c in rank_set.plan_of(rank).counters]
    for node, counter in rank_set.listing(rank, number).signals.tolist():
        owner, there = named[counter]
        if there == ITERATION_BARRIER:
            openers.setdefault(owner, []).append(node + first)
    processors = slice(int(order.processors.starts[rank]), int(order.processors.starts[rank + 1]))
    lengths = rank_set.listing(rank, number).lengths
    for other, nodes in openers.items():
        if len(nodes) != 1 and not (several and nodes):
            raise refuse(
                f"rank {rank} must signal the iteration barrier of rank {other} exactly once per "
                "iteration"
            )
        rows = order.rows[np.unique(order.clocks(SEEN, np.array(nodes))), processors]
        complete = rows.max(axis=0).astype(np.int64)
        np.maximum.at(
            complete, order.processor[nodes] - processors.start, order.position[nodes] + 1
        )
        if (complete < lengths).any():
            raise refuse(
                f"the iteration barrier of rank {rank} opens before its iteration is complete"
            )
