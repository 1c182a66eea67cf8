"""Part of the verifier: plans in which ranks begin their iterations independently, without a
barrier over all ranks (for example, a pipeline of ranks with several micro-batches in flight). It
checks that different iterations of two ranks do not conflict.

Two consecutive iterations are executed abstractly as if they were one (ark.plan.verify.order). On
each rank the second iteration begins after that rank's own iteration barrier. In the second
iteration, a wait with threshold 0 is a wait for all signals of the first. If two ranks access the
same bytes, one of them in the first iteration and the other in the second, the accesses must be
ordered. If several ranks signal a counter, their signals must be ordered too. Otherwise a fast
rank's signal of the second iteration could be counted in place of a slow rank's signal of the
first.

By induction this holds for any two iterations: if access x of iteration i is ordered before y of
iteration i + 1, it is ordered before y of iteration i + 2, which follows y of iteration i + 1 on
its own rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ark.plan.boxes import candidates
from ark.plan.types import ITERATION_BARRIER
from ark.plan.verify.conflicts import LocalTouches, Touch
from ark.plan.verify.counters import Counters, counters_of
from ark.plan.verify.execution import RAN, Awaited, Run
from ark.plan.verify.needs import Needs, unmet
from ark.plan.verify.order import Order
from ark.plan.verify.rank_set import RankSet, refuse

MORE_THAN_ANY_SIGNALS = 1 << 40  # a threshold that no counter reaches


@dataclass(frozen=True, eq=False)
class _Two:
    """The order of tasks in two consecutive iterations. A node is the number of a task in one of
    the two iterations. twice[k][i]: the node of task i of the phase in iteration k (0 or 1).
    home[r]: the number to add to a node of rank r to get the same task of the rank that is executed
    in its place, in the same iteration.
    """

    order: Order
    twice: tuple[np.ndarray, np.ndarray]
    home: np.ndarray


def check_iterations(
    rank_set: RankSet,
    number: int,
    local: Mapping[int, LocalTouches],
    foreign: Mapping[int, Sequence[Touch]],
    packets: Sequence[Awaited],
    once: Order,
) -> None:
    """Raises PlanError if an iteration of one rank may conflict with another iteration of a peer.
    local: the accesses of each checked rank to its own memory. foreign: the accesses of its peers
    to it. once: the order of the tasks in one iteration.
    """
    barrier = rank_set.plan(0).counters[ITERATION_BARRIER]
    if rank_set.world == 1 or barrier.step == rank_set.world:
        return
    counters = counters_of(rank_set, number)
    two = _execute(rank_set, number, counters, packets, once)
    _check_signals(rank_set, counters, two)
    for rank in rank_set.checked:
        _check_memory(rank_set, number, rank, local[rank], foreign, two)


def _execute(
    rank_set: RankSet,
    number: int,
    counters: Counters,
    packets: Sequence[Awaited],
    once: Order,
) -> _Two:
    """Executes two iterations abstractly. Of ranks that do the same work only one is executed, for
    the reason given in ark.plan.verify.order.
    """
    lengths = np.concatenate([rank_set.listing(r, number).lengths for r in range(rank_set.world)])
    bases, home = 2 * once.bases, 2 * once.home
    # Two iterations are simulated: each processor runs the first iteration's tasks, then the
    # second's.
    first = np.arange(len(once.processor)) + (np.cumsum(lengths) - lengths)[once.processor]
    twice = (first, first + lengths[once.processor])
    order_of = np.argsort(np.concatenate(twice))
    processor, rank = np.tile(once.processor, 2)[order_of], np.tile(once.rank, 2)[order_of]
    position = np.concatenate((once.position, once.position + lengths[once.processor]))[order_of]

    def nodes_of(starts: np.ndarray) -> np.ndarray:
        return np.concatenate([np.arange(starts[r], starts[r + 1]) for r in rank_set.checked])

    part, begun = nodes_of(bases), nodes_of(once.bases)
    run = Run(processor[part], position[part], 2 * lengths, once.processors)
    executed = [renumbered[begun] + home[once.rank[begun]] for renumbered in twice]
    begins = np.flatnonzero(once.position[begun] == 0)
    barriers = np.array([counters.offsets[r] for r in once.rank[begun[begins]].tolist()], np.int64)
    opened = np.column_stack(
        (
            barriers + ITERATION_BARRIER,
            executed[1][begins],
            np.full(len(begins), MORE_THAN_ANY_SIGNALS),
        )
    )
    run.add_counters(_unrolled(rank_set, counters, executed, opened))
    first_of = once.bases[:-1] + once.home
    for renumbered in executed:
        run.add_packets(packets, partial(_moved, renumbered, first_of))
    stuck = run.execute()
    if stuck is not None:
        raise refuse(
            f"its waits deadlock between iterations: {stuck[0]} tasks of two iterations never start"
        )
    rows = run.rows[: run.known]
    order = Order(bases, rank, processor, position, run.clock, rows, home, once.processors)
    return _Two(order, twice, once.home)


def _moved(
    renumbered: np.ndarray, first_of: np.ndarray, rank: np.ndarray, nodes: np.ndarray
) -> np.ndarray:
    return np.asarray(renumbered[first_of[rank] + nodes])


def _unrolled(
    rank_set: RankSet, counters: Counters, executed: Sequence[np.ndarray], opened: np.ndarray
) -> Counters:
    """The signals and waits of two iterations. The counters of the second iteration are separate
    counters, numbered after those of the first. executed: for each iteration, the node that each
    task of the phase has in it. opened: the waits of the second iteration for the iteration
    barriers of the first.
    """
    total = sum(len(plan.counters) for plan in rank_set.checked_plans)
    signals: list[np.ndarray] = []
    waits = [opened]
    lags = counters.waits[:, 2] == 0
    for number, renumbered in enumerate(executed):
        for rows, rows_of_ranks in ((counters.signals, signals), (counters.waits[~lags], waits)):
            moved = rows.copy()
            moved[:, 0] += number * total
            moved[:, 1] = renumbered[rows[:, 1]]
            rows_of_ranks.append(moved)
    late = counters.waits[lags]
    waits.append(
        np.column_stack(
            (late[:, 0], executed[1][late[:, 1]], np.full(len(late), MORE_THAN_ANY_SIGNALS))
        )
    )
    return Counters(counters.offsets, np.concatenate(signals), np.concatenate(waits))


def _check_signals(rank_set: RankSet, counters: Counters, two: _Two) -> None:
    """Raises PlanError unless, for each counter that several ranks signal, all signals of one
    iteration are ordered before all signals of the next.
    """
    order = np.argsort(counters.signals[:, 0], kind="stable")
    rows = counters.signals[order]
    for part in np.split(rows, np.flatnonzero(np.diff(rows[:, 0])) + 1):
        if len(set(part[:, 2].tolist())) < 2:
            continue
        nodes = part[:, 1] - two.home[part[:, 2]]
        first = np.repeat(two.twice[0][nodes], len(part))
        second = np.tile(two.twice[1][nodes], len(part))
        if not two.order.before(first, second, RAN).all():
            owner = max(r for r, at in counters.offsets.items() if at <= part[0, 0])
            name = rank_set.plan(owner).counters[part[0, 0] - counters.offsets[owner]].name
            raise refuse(
                f"counter {name!r} of rank {owner} is signalled by several ranks whose iterations "
                "are not ordered; each rank's signals of an iteration must precede all signals "
                "of the next"
            )


def _check_memory(
    rank_set: RankSet,
    number: int,
    owner: int,
    touches: LocalTouches,
    foreign: Mapping[int, Sequence[Touch]],
    two: _Two,
) -> None:
    """Raises PlanError if two ranks may conflict in the owner's memory across iterations: they
    access the same bytes, one of them in an iteration and the other in the next one, and the
    accesses are not ordered. Each access of a pair is tried as the earlier one.
    """
    listed, base = rank_set.listing(owner, number), int(two.order.bases[owner]) // 2
    needs = Needs()
    named: list[tuple[Touch, Touch]] = []
    for space in sorted({t.region.space for t in foreign[owner]}, key=repr):
        peers = [t for t in foreign[owner] if t.region.space == space]
        local = [
            Touch(owner, r, listed.by_op[r.op][0] + base) for r in touches.by_space.get(space, ())
        ]
        everyone = [*peers, *local]
        ends = [
            np.array([(t.region.begin, t.region.end) for t in part]).T for part in (peers, everyone)
        ]
        for rows, columns in candidates(*ends[0], *ends[1]):
            for i, j in zip(rows.tolist(), columns.tolist(), strict=True):
                a, b = peers[i], everyone[j]
                if j <= i or a.rank == b.rank or not a.region.meets(b.region):
                    continue
                for first, second in ((a, b), (b, a)):
                    firsts, seconds = two.twice[0][first.nodes], two.twice[1][second.nodes]
                    needs.add(first.region, second.region, firsts, seconds)
                    named.append((first, second))
    bad = unmet(needs.freeze(two.order.processor), two.order, 0)
    if bad is None:
        return
    regions = needs.pair(bad[2])
    first, second = next(p for p in named if (p[0].region, p[1].region) == regions)
    names = [rank_set.plan(t.rank).ops[t.region.op].name for t in (first, second)]
    buffer = rank_set.plan(owner).buffers[int(first.region.memory)]  # type: ignore[call-overload]
    verbs = ["writes" if t.region.write else "reads" for t in (first, second)]
    raise refuse(
        f"op {names[0]!r} (rank {first.rank}) {verbs[0]} {buffer.name!r} and op {names[1]!r} (rank "
        f"{second.rank}) {verbs[1]} the same bytes, but the second op's next iteration does not "
        "wait for the first op"
    )
