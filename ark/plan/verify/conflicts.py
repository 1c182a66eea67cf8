"""Third part of the verifier: memory. Whatever touches the same bytes, at least once writing, must
be ordered as the program orders it; nothing is read that was not written; lifetimes do not overlap.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from ark.ir.dtype import by_name
from ark.plan.access import Frame, Region, regions
from ark.plan.kind import Access
from ark.plan.verify.order import RAN, SEEN, Key, Order, op_regions
from ark.plan.verify.structure import Fleet, refuse


@dataclass(frozen=True)
class _Touch:
    """An op's accesses to one operand; owner: (rank, buffer) of the memory; nodes by region row."""

    rank: int
    op: int
    region: Region
    owner: Key
    begin: int
    end: int
    nodes: np.ndarray
    pretended: bool = False  # an order without a byte: the op only comes after


def check_conflicts(fleet: Fleet, order: Order) -> None:
    """Raises PlanError for the first conflict of a phase that is not ordered."""
    touches = _touches(fleet, order)
    spaces: dict[tuple[str, int, int], list[_Touch]] = defaultdict(list)
    for touch in touches:
        rank, buffer = touch.owner
        entry = fleet.plans[rank].buffers[buffer]
        alone = buffer if entry.arena == "external" else -1
        spaces[entry.arena, rank, alone].append(touch)
    for _, members in sorted(spaces.items()):
        _check_lifetimes(fleet, members)
        members.sort(key=lambda t: (t.op, t.rank))
        for j, later in enumerate(members):
            for earlier in members[: j + 1]:
                if earlier.begin < later.end and later.begin < earlier.end:
                    _check_pair(fleet, order, earlier, later)
    for rank in range(len(fleet.plans)):
        _check_reads(fleet, order, [t for t in touches if t.owner[0] == rank])


def _touches(fleet: Fleet, order: Order) -> list[_Touch]:
    found = []
    for (rank, op), members in sorted(order.by_op.items()):
        for region in op_regions(fleet, rank, op, [order.nodes[i].task for i in members]):
            owner = fleet.buffer_of(rank, region.buffer)
            entry = fleet.plans[owner[0]].buffers[owner[1]]
            base = entry.offset if owner[0] != rank else 0
            nodes = np.array(members)[region.tasks]
            found.append(
                _Touch(rank, op, region, owner, region.begin + base, region.end + base, nodes)
            )
        for tensor in fleet.plans[rank].ops[op].after:
            found += _pretended(fleet, order, rank, op, tensor, members)
    return found


def _pretended(
    fleet: Fleet, order: Order, rank: int, op: int, tensor: int, members: list[int]
) -> list[_Touch]:
    """Reads that an op pretends to do, so that it comes after a tensor is complete."""
    plan = fleet.plans[rank]
    shape = plan.tensors[tensor].shape
    whole = [(i, Access(0, (0,) * len(shape), shape)) for i in range(len(members))]
    sizes = [8 if t.packet else by_name(t.dtype).itemsize for t in plan.tensors]
    (region,) = regions(plan.tensors, plan.buffers, sizes, [tensor], whole)
    owner = fleet.buffer_of(rank, region.buffer)
    nodes = np.array(members)
    return [_Touch(rank, op, region, owner, region.begin, region.end, nodes, pretended=True)]


def _same_layout(a: Frame, b: Frame) -> bool:
    return a.extents == b.extents and a.itemsize == b.itemsize


def _check_pair(fleet: Fleet, order: Order, earlier: _Touch, later: _Touch) -> None:
    if not earlier.region.meets(later.region):
        return
    if earlier is later and not later.region.write:
        return
    alike = (earlier.rank, earlier.op) == (later.rank, later.op)
    if alike and (earlier.pretended or later.pretended):
        return  # an op does not come after itself
    ordered = _ordered(order, earlier, later)
    if earlier.rank != later.rank:
        # No program order between ranks: the write must come first, or nobody knows what is read.
        if later.region.write and not earlier.region.write:
            ordered = _ordered(order, later, earlier).T
        elif later.region.write:
            ordered = ordered | _ordered(order, later, earlier).T
    elif earlier.op == later.op:
        ordered = ordered | _ordered(order, later, earlier).T
    loose = ~ordered & (later.nodes[:, None] != earlier.nodes[None, :])
    if not loose.any():
        return  # most pairs: what is far apart in the program is ordered, whatever it touches
    bad = loose & _overlaps(earlier, later)
    if bad.any():
        row, column = (int(v[0]) for v in np.nonzero(bad))
        raise refuse(_describe(fleet, order, earlier, int(column), later, int(row)))


def _ordered(order: Order, first: _Touch, second: _Touch) -> np.ndarray:
    """(second rows, first rows) of bool: what was written must be seen, what was read be past.

    Packets carry their own epoch, so that seeing one is seeing its write.
    """
    seen = first.region.write and not first.region.packet
    return order.before(first.nodes, second.nodes, SEEN if seen else RAN)


def _overlaps(earlier: _Touch, later: _Touch) -> np.ndarray:
    """(later rows, earlier rows) of bool."""
    if earlier.rank == later.rank:
        return later.region.overlaps(earlier.region)
    a, b = later.region, earlier.region
    if earlier.owner == later.owner and _same_layout(a.frame, b.frame):
        below = a.lo[:, None, :] < b.hi[None, :, :]
        return np.asarray((below & (b.lo[None, :, :] < a.hi[:, None, :])).all(axis=2))
    shift_a, shift_b = later.begin - a.begin, earlier.begin - b.begin
    below = a.bytes_lo[:, None] + shift_a < b.bytes_hi[None, :] + shift_b
    return below & (b.bytes_lo[None, :] + shift_b < a.bytes_hi[:, None] + shift_a)


def _describe(
    fleet: Fleet, order: Order, earlier: _Touch, column: int, later: _Touch, row: int
) -> str:
    first, second = order.nodes[earlier.nodes[column]], order.nodes[later.nodes[row]]
    names = [fleet.plans[t.rank].ops[t.op].name for t in (earlier, later)]
    verbs = ["writes" if t.region.write else "reads" for t in (earlier, later)]
    buffer = fleet.plans[earlier.owner[0]].buffers[earlier.owner[1]].name
    return (
        f"tile {list(first.task.coord)} of op {names[0]!r} (rank {earlier.rank}) {verbs[0]} "
        f"{buffer!r} and tile {list(second.task.coord)} of op {names[1]!r} (rank {later.rank}) "
        f"{verbs[1]} the same bytes, but nothing makes the second wait for the first"
    )


def _check_lifetimes(fleet: Fleet, members: list[_Touch]) -> None:
    """Buffers that share bytes are not alive at the same time; lasting ones share with nobody."""
    alive: dict[Key, tuple[int, int]] = {}
    for touch in members:
        first, last = alive.get(touch.owner, (touch.op, touch.op))
        alive[touch.owner] = (min(first, touch.op), max(last, touch.op))
    entries = [(fleet.plans[r].buffers[b], span) for (r, b), span in sorted(alive.items())]
    entries.sort(key=lambda e: e[0].offset)
    for i, (a, (a_first, a_last)) in enumerate(entries):
        for b, (b_first, b_last) in entries[i + 1 :]:
            if b.offset >= a.offset + a.nbytes:
                break
            if a.arena == "external":
                continue
            if a.initial or b.initial or (a_first <= b_last and b_first <= a_last):
                raise refuse(f"buffers {a.name!r} and {b.name!r} share memory while both are alive")


def _check_reads(fleet: Fleet, order: Order, touches: list[_Touch]) -> None:
    """Every byte read was written earlier in the iteration, or the buffer held data before it."""
    written: dict[Key, np.ndarray] = {}
    remote: dict[Key, list[_Touch]] = defaultdict(list)
    for touch in touches:
        if touch.region.write and touch.rank != touch.owner[0]:
            remote[touch.owner].append(touch)
    for touch in sorted(touches, key=lambda t: (t.op, t.region.write)):
        buffer = fleet.plans[touch.owner[0]].buffers[touch.owner[1]]
        frame = touch.region.frame
        if buffer.initial or touch.rank != touch.owner[0] or touch.pretended:
            continue
        elements = buffer.nbytes // frame.itemsize
        known = written.setdefault(touch.owner, np.zeros(elements, bool))
        if len(known) != elements:
            raise refuse(f"buffer {buffer.name!r} is used with elements of different sizes")
        view = known[: math.prod(frame.extents)].reshape(
            (1,) * (4 - len(frame.extents)) + frame.extents
        )
        for row, (lo, hi) in enumerate(zip(touch.region.lo, touch.region.hi, strict=True)):
            box = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
            if touch.region.write:
                view[box] = True
            elif not view[box].all() and not _delivered(order, touch, row, remote[touch.owner]):
                op = fleet.plans[touch.rank].ops[touch.op].name
                raise refuse(
                    f"tile {list(order.nodes[touch.nodes[row]].task.coord)} of op {op!r} on rank "
                    f"{touch.rank} reads bytes of {buffer.name!r} that nobody has written"
                )


def _delivered(order: Order, touch: _Touch, row: int, writers: list[_Touch]) -> bool:
    """True if peers' writes, complete before the read starts, cover what it reads."""
    lo, hi = touch.region.lo[row], touch.region.hi[row]
    needed = int(np.prod(hi - lo))
    for writer in writers:
        if not _same_layout(writer.region.frame, touch.region.frame):
            continue
        complete = order.before(writer.nodes, touch.nodes[row : row + 1], SEEN)[0]
        low = np.maximum(writer.region.lo[complete], lo)
        high = np.minimum(writer.region.hi[complete], hi)
        needed -= int(np.prod(np.maximum(high - low, 0), axis=1).sum())
    return needed <= 0
