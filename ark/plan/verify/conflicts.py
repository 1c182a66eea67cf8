"""Part of the verifier: memory. Two accesses to the same bytes, at least one of them a write, must
run in program order. Buffers that share memory must not be alive at the same time.

The accesses of a rank to its own memory are searched in program order, once for all ranks whose
plans differ only in names. Accesses that later writes cover are dropped from the search
(ark.plan.frontier). An access to a peer's memory is compared with all accesses to that memory.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ark.plan.access import Region
from ark.plan.boxes import candidates
from ark.plan.frontier import Frontier
from ark.plan.types import PlanBuffer, Task
from ark.plan.verify.execution import spans
from ark.plan.verify.needs import Frozen, Needs, must, unmet
from ark.plan.verify.order import Order, first_nodes
from ark.plan.verify.rank_set import RankSet, refuse

ByOp = dict[int, tuple[np.ndarray, tuple[tuple[int, ...], ...]]]
Pairs = tuple[Region, Region, np.ndarray, np.ndarray]  # two accesses and their conflicting nodes


@dataclass(frozen=True)
class Touch:
    """An op's access to memory of another rank. rank: the accessing rank. region: the accessed
    boxes, with buffers and byte offsets as in the plan of the rank that owns the memory. nodes: the
    op's tasks, in a numbering that covers the tasks of all ranks.
    """

    rank: int
    region: Region
    nodes: np.ndarray


class LocalTouches:
    """The accesses of a rank's tasks to its own memory in one phase. Also the pairs of tasks that
    must run in program order because of these accesses. Task numbers are those within the rank.
    """

    def __init__(self, rank_set: RankSet, rank: int, number: int) -> None:
        listed = rank_set.listing(rank, number)
        self.needs = Needs()
        self.either: list[Pairs] = []
        self.packets: list[Region] = []  # accesses to data that is written or read as packets
        self.by_space: dict[Hashable, list[Region]] = defaultdict(list)
        frontier = Frontier()
        for touched in rank_set.touches(rank, number):
            mine = [r for r in touched if r.space is not None]
            for region in mine:
                for other in frontier.conflicts(region):
                    nodes = listed.by_op[other.op][0], listed.by_op[region.op][0]
                    self.needs.add(other, region, *nodes)
                self.by_space[region.space].append(region)
                if region.packet and not region.pretended:
                    self.packets.append(region)
            self.either += _inside(mine, listed.by_op)
            frontier.add(mine)
        self.frozen: Frozen = self.needs.freeze(listed.processor)


def _inside(mine: Sequence[Region], by_op: ByOp) -> list[Pairs]:
    """Finds the pairs of tasks of one op that access the same bytes, where one of them writes."""
    pairs = []
    real = [r for r in mine if not r.pretended]
    for i, a in enumerate(real):
        for b in real[i:]:
            if a.space != b.space or not a.meets(b) or a.end <= b.begin or b.end <= a.begin:
                continue
            boxes = a.boxes
            if a is b and boxes.disjoint and len(boxes.tasks) == len(boxes.lo):
                continue
            nodes = by_op[a.op][0]
            first, second = _meeting(a, b, nodes, nodes)
            if len(first):
                pairs.append((a, b, first, second))
    return pairs


def _meeting(
    a: Region, b: Region, of_a: np.ndarray, of_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of tasks that access the same bytes, one in region a and one in region b. A task is not
    paired with itself. of_a, of_b: the nodes (task numbers within the rank) of the tasks of both
    ops.
    """
    rows, columns = a.overlaps(b)
    (tasks_a, starts_a), (tasks_b, starts_b) = a.boxes.by_box, b.boxes.by_box
    many = starts_a[rows + 1] - starts_a[rows]
    first = of_a[tasks_a[spans(starts_a[rows], starts_a[rows + 1])]]
    columns = np.repeat(columns, many)
    many = starts_b[columns + 1] - starts_b[columns]
    second = of_b[tasks_b[spans(starts_b[columns], starts_b[columns + 1])]]
    first = np.repeat(first, many)
    return first[first != second], second[first != second]


def check_conflicts(
    rank_set: RankSet,
    order: Order,
    number: int,
    local: Mapping[int, LocalTouches],
    foreign: Mapping[int, Sequence[Touch]],
) -> None:
    """Raises PlanError if the plan does not order two tasks of a phase that conflict. Two tasks
    conflict if they access the same bytes of a checked rank's memory and one of them writes. The
    error names the first such pair.
    """
    for rank, touches in local.items():
        base = int(order.bases[rank])
        bad = unmet(touches.frozen, order, base)
        if bad is not None:
            first, second = touches.needs.pair(bad[2])
            raise refuse(_describe(rank_set, order, number, first, second, bad[0], bad[1], rank))
        for first, second, firsts, seconds in touches.either:
            _check_either(
                rank_set, order, number, first, second, firsts + base, seconds + base, rank
            )
        _check_lifetimes(rank_set, rank, touches, foreign[rank])
        if foreign[rank]:
            _check_foreign(rank_set, order, number, rank, touches, foreign[rank])


def foreign_touches(rank_set: RankSet, number: int) -> dict[int, list[Touch]]:
    """For each checked rank, the accesses of its peers to its memory in a phase."""
    touches: dict[int, list[Touch]] = {rank: [] for rank in rank_set.checked}
    bases = first_nodes(rank_set, number)
    for rank in range(rank_set.world):
        nodes, base = rank_set.listing(rank, number).by_op, int(bases[rank])
        for region in (r for op in rank_set.touches(rank, number) for r in op if r.space is None):
            owner = rank_set.owner_of(rank, region)
            if owner in touches:
                moved = rank_set.seen_by_owner(owner, rank, region)
                touches[owner].append(Touch(rank, moved, nodes[region.op][0] + base))
    return touches


def _check_foreign(
    rank_set: RankSet,
    order: Order,
    number: int,
    owner: int,
    touches: LocalTouches,
    foreign: Sequence[Touch],
) -> None:
    """Compares each access of a peer to this rank's memory with all other accesses to it, by the
    rank itself or by peers.

    There is no program order between ranks, so either of two conflicting accesses may come first,
    but the plan must order them. ark.plan.verify.reads checks separately that data is written
    before it is read. Data sent as packets is written once.
    """
    listed = rank_set.listing(owner, number)
    base = int(order.bases[owner])
    needs = Needs()
    for space in sorted({t.region.space for t in foreign}, key=repr):
        peers = [t for t in foreign if t.region.space == space]
        local = [
            Touch(owner, r, listed.by_op[r.op][0] + base) for r in touches.by_space.get(space, ())
        ]
        everyone = [*peers, *local]
        ends = [np.array([_span(t.region) for t in part]).T for part in (peers, everyone)]
        for rows, columns in candidates(*ends[0], *ends[1]):
            for i, j in zip(rows.tolist(), columns.tolist(), strict=True):
                if j >= i:  # compare each pair of peers' accesses once
                    _compare(rank_set, order, number, needs, owner, peers[i], everyone[j])
    bad = unmet(needs.freeze(order.processor), order, 0)
    if bad is not None:
        first, second = needs.pair(bad[2])
        raise refuse(_describe(rank_set, order, number, first, second, bad[0], bad[1], owner))


def _compare(
    rank_set: RankSet, order: Order, number: int, needs: Needs, owner: int, a: Touch, b: Touch
) -> None:
    if not a.region.meets(b.region):
        return
    same_op = (a.rank, a.region.op) == (b.rank, b.region.op)
    if same_op and (a.region.pretended or b.region.pretended):
        return  # an op does not depend on itself
    if a.rank == b.rank and a.region.op != b.region.op:
        first, second = (a, b) if a.region.op < b.region.op else (b, a)
        needs.add(first.region, second.region, first.nodes, second.nodes)
    elif (a.region.packet or b.region.packet) and a.region.write != b.region.write:
        first, second = (a, b) if a.region.write else (b, a)
        needs.add(first.region, second.region, first.nodes, second.nodes)
    else:
        pairs = _meeting(a.region, b.region, a.nodes, b.nodes)
        _check_either(rank_set, order, number, a.region, b.region, *pairs, owner)


def _span(region: Region) -> tuple[int, int]:
    return region.begin, region.end


def _check_either(
    rank_set: RankSet,
    order: Order,
    number: int,
    first: Region,
    second: Region,
    firsts: np.ndarray,
    seconds: np.ndarray,
    owner: int,
) -> None:
    """Raises PlanError unless, in each pair of tasks (firsts[i], seconds[i]), one runs before the
    other, in either order.
    """
    if not len(firsts):
        return
    fine = order.before(firsts, seconds, must(first, second))
    fine |= order.before(seconds, firsts, must(second, first))
    if not fine.all():
        at = int(np.flatnonzero(~fine)[0])
        nodes = int(firsts[at]), int(seconds[at])
        raise refuse(_describe(rank_set, order, number, first, second, *nodes, owner))


def _describe(
    rank_set: RankSet,
    order: Order,
    number: int,
    first: Region,
    second: Region,
    earlier: int,
    later: int,
    owner: int,
) -> str:
    parties = []
    for region, node in ((first, earlier), (second, later)):
        rank, task = task_at(rank_set, order, number, node)
        name = rank_set.plan(rank).ops[task.op].name
        verb = "writes" if region.write else "reads"
        parties.append((f"tile {list(task.coord)} of op {name!r} (rank {rank})", verb))
    buffer = rank_set.plan(owner).buffers[int(first.memory)]  # type: ignore[call-overload]
    return (
        f"{parties[0][0]} {parties[0][1]} {buffer.name!r} and {parties[1][0]} {parties[1][1]} the "
        "same bytes, but nothing makes the second wait for the first"
    )


def task_at(rank_set: RankSet, order: Order, number: int, node: int) -> tuple[int, Task]:
    """The rank to which a task belongs, and the task. node: the number of the task, counted over
    all ranks.
    """
    rank = int(np.searchsorted(order.bases, node, "right")) - 1
    return rank, rank_set.listing(rank, number).tasks[node - int(order.bases[rank])]


def _check_lifetimes(
    rank_set: RankSet, rank: int, touches: LocalTouches, foreign: Iterable[Touch]
) -> None:
    """Raises PlanError if buffers that share bytes are alive at the same time. Buffers with initial
    contents are always alive.
    """
    spans_of: dict[Hashable, dict[int, tuple[float, float]]] = defaultdict(dict)
    buffers = rank_set.plan(rank).buffers
    touched = (t.region for t in foreign)
    for region in (r for part in (*touches.by_space.values(), touched) for r in part):
        number = int(region.memory)  # type: ignore[call-overload]
        known = spans_of[region.space]
        if buffers[number].initial:
            known[number] = (-math.inf, math.inf)
            continue
        first, last = known.get(number, (region.op, region.op))
        known[number] = (min(first, region.op), max(last, region.op))
    for _, alive in sorted(spans_of.items(), key=lambda kv: repr(kv[0])):
        _check_disjoint([(buffers[b], *span) for b, span in alive.items()])


def _check_disjoint(entries: Sequence[tuple[PlanBuffer, float, float]]) -> None:
    """Raises PlanError if two buffers overlap in memory while both are alive. It goes through the
    entries in the order of time, keeps the live buffers sorted by offset, and compares neighbours.
    """
    alive: list[tuple[int, int, int]] = []  # offset, end, number
    deaths = sorted((last, i) for i, (_, _, last) in enumerate(entries))
    done = 0
    for i in sorted(range(len(entries)), key=lambda n: (entries[n][1], n)):
        buffer, first, _ = entries[i]
        while deaths[done][0] < first:
            ended = entries[deaths[done][1]][0]
            place = (ended.offset, ended.offset + ended.nbytes, deaths[done][1])
            del alive[bisect_left(alive, place)]
            done += 1
        place = (buffer.offset, buffer.offset + buffer.nbytes, i)
        at = bisect_left(alive, place)
        for other in alive[max(at - 1, 0) : at + 1]:
            if other[0] < place[1] and place[0] < other[1]:
                raise refuse(
                    f"buffers {buffer.name!r} and {entries[other[2]][0].name!r} share memory while "
                    "both are alive"
                )
        insort(alive, place)
