"""Third part of the verifier: the tasks that are certainly complete when a task starts.

A phase is executed abstractly (ark.plan.verify.execution). Counters only grow, so if any execution
comes to an end this one does, and if it stops, every execution stops (no deadlock is missed, none
is invented). A wait for all of a counter's signals orders the task after every one that signals; a
lower threshold lets an iteration start on any subset and orders nothing.

Of ranks that do the same only one is executed: a step runs all tasks that can run, so their images
on the other ranks run in the same step, and know the same with the ranks renamed.
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
    """The completed tasks, and their visible writes, when a task starts. A counter proves both. A
    packet publishes no other memory, and its maker's other warps may still be at work: it proves to
    the tasks after its reader on the same processor that all tasks before its writer have run.

    Nodes and processors are counted over all ranks; bases: the first node of each rank, and one
    past the last. rows[clock[RAN, i], l]: how many tasks of processor l have certainly run before
    node i of those that are executed starts, were it on another processor; with SEEN, of how many
    it sees what they wrote. home[r]: what to add to a node of rank r for its twin's among these.
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
        """The rows of nodes, as their twins know them."""
        return np.asarray(self.clock[which, nodes + self.home[self.rank[nodes]]])

    def known(self, rows: np.ndarray, earlier: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """For each pair: True where the earlier node is in a row of a node of that rank."""
        column = self.processor[earlier] + self.processors.moved[rank, self.rank[earlier]]
        return np.asarray(self.rows[rows, column] > self.position[earlier])

    def before(self, earlier: np.ndarray, later: np.ndarray, which: np.ndarray | int) -> np.ndarray:
        """For each pair of nodes: True where the earlier one has run (or is seen, by `which`)."""
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
    """Orders the phase; PlanError if counters do not add up or the execution stops."""
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
    """The task that opens the iteration barrier runs after every other task of its rank."""
    first = int(order.bases[rank])
    barrier_step = rank_set.plan(rank).counters[ITERATION_BARRIER].step
    others = range(rank_set.world) if barrier_step > 1 else (rank,)
    several = rank_set.world == 1  # one rank's tasks may open it together
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
