"""Part of the verifier: accesses of different phases to the same memory, in plans in which ranks
begin iterations without a barrier over all ranks. Called by ark.plan.verify.

A rank may begin a phase while its peers still run the previous one, and no counter relates
iterations of two phases. So two accesses in different phases are ordered only if one rank makes
both of them, because the rank's own iteration barrier is then between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from ark.plan.boxes import candidates
from ark.plan.types import ITERATION_BARRIER
from ark.plan.verify.conflicts import LocalTouches, Touch
from ark.plan.verify.rank_set import Key, RankSet, refuse

Touches = tuple[Mapping[int, LocalTouches], Mapping[int, Sequence[Touch]]]


def check_counters(rank_set: RankSet) -> None:
    """Raises PlanError for a counter that is signalled in two phases, because a wait counts the
    iterations of its own phase only.
    """
    phase_of: dict[Key, int] = {}
    for number in range(len(rank_set.plan(0).phases)):
        for plan in rank_set.checked_plans:
            listed = rank_set.listing(plan.rank, number)
            for counter in np.unique(listed.signals[:, 1]).tolist():
                owner, entry = rank_set.counter_of(plan.rank, counter)
                if (
                    entry == ITERATION_BARRIER
                    or phase_of.setdefault((owner, entry), number) == number
                ):
                    continue
                first = plan.phases[phase_of[owner, entry]].name
                raise refuse(
                    f"counter {plan.counters[counter].name!r} is signalled in the phases {first!r} "
                    f"and {plan.phases[number].name!r}; a counter belongs to one phase"
                )


def check_memory(rank_set: RankSet, touches: Sequence[Touches]) -> None:
    """Raises PlanError if two ranks access the same bytes in different phases and one of them
    writes. touches: for each phase, the accesses of each checked rank to its own memory, and the
    accesses of its peers to it.
    """
    for (_, foreign), (local, others) in itertools.permutations(touches, 2):
        for owner in rank_set.checked:
            _compare(rank_set, owner, foreign[owner], others[owner])
            mine = [
                Touch(owner, region, np.empty(0, np.int64))
                for regions in local[owner].by_space.values()
                for region in regions
            ]
            _compare(rank_set, owner, foreign[owner], mine)


def _compare(
    rank_set: RankSet, owner: int, peers: Sequence[Touch], others: Sequence[Touch]
) -> None:
    for space in sorted({t.region.space for t in peers}, key=repr):
        left = [t for t in peers if t.region.space == space]
        right = [t for t in others if t.region.space == space]
        if not right:
            continue
        ends = [np.array([(t.region.begin, t.region.end) for t in p]).T for p in (left, right)]
        for rows, columns in candidates(*ends[0], *ends[1]):
            for i, j in zip(rows.tolist(), columns.tolist(), strict=True):
                a, b = left[i], right[j]
                if a.rank == b.rank or not a.region.meets(b.region):
                    continue
                if not len(a.region.overlaps(b.region)[0]):
                    continue
                names = [rank_set.plan(t.rank).ops[t.region.op].name for t in (a, b)]
                raise refuse(
                    f"op {names[0]!r} of rank {a.rank} and op {names[1]!r} of rank {b.rank}, in "
                    f"another phase, access the same memory of rank {owner}, but the iterations of "
                    "the two ranks are not ordered"
                )
