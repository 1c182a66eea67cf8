"""Part of the verifier: collects the signals and waits of each counter from the plans of all ranks,
and checks that their numbers match. Used by ark.plan.verify.order and ark.plan.verify.iterations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ark.plan.types import ITERATION_BARRIER
from ark.plan.verify.rank_set import RankSet, refuse


@dataclass(frozen=True, eq=False)
class Counters:
    """The signals and waits of the counters in one phase. Counters are numbered rank by rank; those
    of rank r begin at offsets[r]. Only one of several ranks that do the same work is checked, and a
    node is a task of a checked rank.

    A row of `signals` is (counter, node, rank): on rank `rank`, the task that corresponds to `node`
    signals the counter. A row of `waits` is (counter, node, threshold).
    """

    offsets: dict[int, int]
    signals: np.ndarray
    waits: np.ndarray

    def check(self, rank_set: RankSet) -> None:
        """Raises PlanError unless the step of each counter is the number of signals that it gets in
        an iteration, and no task waits for more signals.
        """
        total = sum(len(plan.counters) for plan in rank_set.checked_plans)
        many = np.bincount(self.signals[:, 0], minlength=total)
        asked = np.full(total, -1)
        np.maximum.at(asked, self.waits[:, 0], self.waits[:, 2])
        for plan in rank_set.checked_plans:
            at = self.offsets[plan.rank]
            part = slice(at, at + len(plan.counters))
            step = np.array([c.step for c in plan.counters], np.int64)
            local = np.array([c.rank == plan.rank for c in plan.counters])
            system = np.array([c.system for c in plan.counters])
            far = np.zeros(len(plan.counters), bool)
            foreign = self.signals[self.signals[:, 2] != plan.rank, 0] - at
            far[foreign[(foreign >= 0) & (foreign < len(far))]] = True
            wrong = (many[part] > 0) & (many[part] != step)
            wrong |= ((asked[part] >= 0) & (many[part] == 0)) | (asked[part] > step)
            wrong |= far & ~system
            wrong[ITERATION_BARRIER] |= many[at + ITERATION_BARRIER] != step[ITERATION_BARRIER]
            for i in np.flatnonzero(wrong & local)[:1].tolist():
                self._refuse(rank_set, plan.rank, i, int(many[at + i]), int(asked[at + i]))

    def _refuse(self, rank_set: RankSet, rank: int, number: int, many: int, asked: int) -> None:
        counter = rank_set.plan(rank).counters[number]
        subject = f"counter {counter.name!r} of rank {rank}"
        if number == ITERATION_BARRIER and many != counter.step:
            raise refuse(
                f"the iteration barrier of rank {rank} gets {many} signals in an iteration; "
                f"its step field says {counter.step}"
            )
        if many and many != counter.step:
            raise refuse(
                f"{subject} gets {many} signals in an iteration; its step field says {counter.step}"
            )
        if asked >= 0 and not many:
            raise refuse(f"{subject} has waits but no signals, so they never end")
        if asked > counter.step:
            raise refuse(
                f"a task waits for {asked} signals of {subject}, which gets only {counter.step} in "
                "an iteration"
            )
        raise refuse(f"{subject} is signalled by peers and has device scope; expected system scope")


def counters_of(rank_set: RankSet, number: int) -> Counters:
    """The signals and waits of all counters in a phase. Of ranks that do the same work only one is
    checked, and only its tasks are listed as nodes.
    """
    offsets, first, total, nodes = {}, {}, 0, 0
    for plan in rank_set.checked_plans:
        offsets[plan.rank], first[plan.rank] = total, nodes
        total += len(plan.counters)
        nodes += len(rank_set.listing(plan.rank, number).tasks)
    signals, waits = [], []
    owners = {}
    for plan in rank_set.checked_plans:
        named = [rank_set.counter_of(plan.rank, c.id) for c in plan.counters]
        owners[plan.rank] = np.array(named, np.int64).reshape(-1, 2)
        listed = rank_set.listing(plan.rank, number)
        waits.append(listed.waits[:, [1, 0, 2]] + [offsets[plan.rank], first[plan.rank], 0])
    start = np.array([offsets.get(rank, -1) for rank in range(rank_set.world)])
    for rank, twin in enumerate(rank_set.symmetry.twin):
        node, counter = rank_set.listing(rank, number).signals.T
        owner, there = owners[twin][counter].T
        owner = np.array(rank_set.symmetry.renaming[rank])[owner]
        kept = start[owner] >= 0
        node, owner, there = node[kept], owner[kept], there[kept]
        rows = (start[owner] + there, node + first[twin], np.full(len(node), rank))
        signals.append(np.stack(rows, axis=1))
    return Counters(offsets, np.concatenate(signals), np.concatenate(waits))
