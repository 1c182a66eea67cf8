"""Part of the verifier: every byte that a task reads was written before in the same iteration, by
the rank itself or by a peer, unless its buffer has valid contents before an iteration.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ark.plan.access import Region
from ark.plan.types import PlanBuffer
from ark.plan.verify.conflicts import LocalTouches, Touch, task_at
from ark.plan.verify.execution import spans
from ark.plan.verify.needs import must
from ark.plan.verify.order import Order
from ark.plan.verify.rank_set import RankSet, refuse

Missing = tuple[Region, np.ndarray]  # a read, and those of its boxes that the rank has not written

# The part of a read that one write covers: the elements that both access, the tasks that write
# them, and the relation that must be proved between writer and reader.
_Part = tuple[list[tuple[slice, ...]], np.ndarray, int]


class _Written:
    """The elements of one buffer that the ops of a rank have written so far."""

    def __init__(self, buffer: PlanBuffer, itemsize: int) -> None:
        self.buffer = buffer
        self.itemsize = itemsize
        self.writes: list[Region] = []
        self._painted = 0
        self._known: np.ndarray | None = None

    def lacks(self, read: Region) -> np.ndarray:
        """The boxes of a read that have elements which were not written before."""
        boxes = read.boxes
        if not self.writes:
            return np.arange(len(boxes.lo))
        if any(_covers(write, read) for write in reversed(self.writes)):
            return np.zeros(0, np.int64)
        if self._known is None:
            self._known = np.zeros(self.buffer.nbytes // self.itemsize, bool)
        for write in self.writes[self._painted :]:
            view = _view(self._known, write)
            for box in _slices(write):
                view[box] = True
        self._painted = len(self.writes)
        view = _view(self._known, read)
        return np.array([i for i, b in enumerate(_slices(read)) if not view[b].all()], np.int64)


def _covers(write: Region, read: Region) -> bool:
    """True only where a write covers every byte of a read of the same buffer. This is decided by
    comparing indices or, if the write covers a range of bytes without gaps, by comparing byte
    ranges.
    """
    whole = write.boxes.fills_span and write.begin <= read.begin and read.end <= write.end
    return whole or write.covers(read)


def _view(known: np.ndarray, region: Region) -> np.ndarray:
    shape = (1,) * (region.boxes.lo.shape[1] - len(region.extents)) + region.extents
    view: np.ndarray = known[: math.prod(region.extents)].reshape(shape)
    return view


def _bounds(region: Region) -> tuple[np.ndarray, np.ndarray]:
    """First and last + 1 indices of a region's boxes in its buffer."""
    shift = np.zeros(region.boxes.lo.shape[1], np.int64)
    shift[len(shift) - len(region.offsets) :] = region.offsets
    return region.boxes.lo + shift, region.boxes.hi + shift


def _slices(region: Region) -> list[tuple[slice, ...]]:
    lo, hi = (v.tolist() for v in _bounds(region))
    return [tuple(map(slice, a, b)) for a, b in zip(lo, hi, strict=True)]


def missing_reads(rank_set: RankSet, rank: int, number: int) -> list[Missing]:
    """The reads of a rank's own memory, with their boxes that the rank's own ops have not written.
    Raises PlanError if a buffer is accessed with two item sizes.
    """
    buffers = rank_set.plan(rank).buffers
    state: dict[int, _Written] = {}
    missing: list[Missing] = []
    for touched in rank_set.touches(rank, number):
        for region in sorted(touched, key=lambda r: r.write):
            if region.space is None or region.pretended:
                continue
            buffer = buffers[int(region.memory)]  # type: ignore[call-overload]
            if buffer.initial:
                continue
            itemsize = region.boxes.itemsize
            known = state.setdefault(buffer.id, _Written(buffer, itemsize))
            if known.itemsize != itemsize:
                raise refuse(
                    f"buffer {buffer.name!r} is accessed with elements of {known.itemsize} and "
                    f"{itemsize} bytes"
                )
            if region.write:
                known.writes.append(region)
            else:
                lacking = known.lacks(region)
                if len(lacking):
                    missing.append((region, lacking))
    return missing


def check_delivered(
    rank_set: RankSet,
    order: Order,
    number: int,
    rank: int,
    missing: Sequence[Missing],
    foreign: Sequence[Touch],
) -> None:
    """Raises PlanError unless peers deliver the data that a rank reads but does not write itself.
    missing: the reads whose boxes the rank's own ops have not written. Writes of peers that are
    complete before the read starts must cover these boxes.
    """
    writers: dict[object, list[Touch]] = defaultdict(list)
    for touch in foreign:
        if touch.region.write:
            writers[touch.region.memory].append(touch)
    listed = rank_set.listing(rank, number)
    base = int(order.bases[rank])
    for region, lacking in missing:
        nodes = listed.by_op[region.op][0] + base
        tasks, starts = region.boxes.by_box
        near = [t for t in writers[region.memory] if t.region.same_frame(region)]
        for box in _in_parts(order, region, lacking, nodes, near).tolist():
            readers = nodes[tasks[starts[box] : starts[box + 1]]]
            if len(near) == len(writers[region.memory]):
                late = _undelivered(order, region, box, readers, near)
            else:
                late = _undelivered_runs(order, region, box, readers, writers[region.memory])
            if late is not None:
                _, task = task_at(rank_set, order, number, late)
                buffer = rank_set.plan(rank).buffers[int(region.memory)]  # type: ignore[call-overload]
                raise refuse(
                    f"tile {list(task.coord)} of op {rank_set.plan(rank).ops[task.op].name!r} on "
                    f"rank {rank} reads bytes of {buffer.name!r} that no earlier task writes"
                )


def check_fetched(
    rank_set: RankSet,
    order: Order,
    number: int,
    rank: int,
    touches: LocalTouches,
    foreign: Sequence[Touch],
) -> None:
    """Raises PlanError unless all data that peers read from a rank's memory was written before, by
    the rank itself or by peers.
    """
    plan = rank_set.plan(rank)
    by_op, base = rank_set.listing(rank, number).by_op, int(order.bases[rank])
    local = [
        Touch(rank, r, by_op[r.op][0] + base)
        for listed in touches.by_space.values()
        for r in listed
    ]
    writers = [t for t in (*foreign, *local) if t.region.write]
    for touch in foreign:
        region = touch.region
        buffer = plan.buffers[int(region.memory)]  # type: ignore[call-overload]
        if region.write or region.pretended or buffer.initial:
            continue
        near = [t for t in writers if t.region.same_frame(region)]
        tasks, starts = region.boxes.by_box
        for box in range(len(region.boxes.lo)):
            readers = touch.nodes[tasks[starts[box] : starts[box + 1]]]
            late = _undelivered(order, region, box, readers, near)
            if late is not None:
                reader, task = task_at(rank_set, order, number, late)
                raise refuse(
                    f"tile {list(task.coord)} of op {rank_set.plan(reader).ops[task.op].name!r} on "
                    f"rank {reader} reads bytes of {buffer.name!r} on rank {rank} that no earlier "
                    "task writes"
                )


def _in_parts(
    order: Order, region: Region, lacking: np.ndarray, nodes: np.ndarray, writers: Sequence[Touch]
) -> np.ndarray:
    """The boxes among `lacking` that need a further check: for some reader, no single earlier write
    of a peer covers the box completely. Several writes together may still cover such a box.
    """
    tasks, starts = region.boxes.by_box
    low, high = _bounds(region)
    wanted = np.zeros(len(low), bool)
    wanted[lacking] = True
    covered = np.zeros(len(tasks), bool)  # by index in `tasks`
    for touch in writers:
        rows, columns = region.overlaps(touch.region)
        lo, hi = _bounds(touch.region)
        parts, firsts = touch.region.boxes.by_box
        whole = wanted[rows] & ((lo[columns] <= low[rows]) & (high[rows] <= hi[columns])).all(
            axis=1
        )
        whole &= np.diff(firsts)[columns] == 1
        rows, columns = rows[whole], columns[whole]
        places = spans(starts[rows], starts[rows + 1])
        writer = np.repeat(touch.nodes[parts[firsts[columns]]], starts[rows + 1] - starts[rows])
        there = order.before(writer, nodes[tasks[places]], must(touch.region, region))
        covered[places[there]] = True
    late = np.concatenate(([0], np.cumsum(~covered)))
    return np.asarray(lacking[late[starts[lacking + 1]] > late[starts[lacking]]])


def _undelivered(
    order: Order, region: Region, box: int, readers: np.ndarray, writers: Sequence[Touch]
) -> int | None:
    """The first reader of a box that may start before the box is completely written: the peers'
    writes that are complete when it starts do not cover the box. None if there is no such reader.
    """
    low, high = (v[box] for v in _bounds(region))
    parts: list[_Part] = []
    for touch in writers:
        lo, hi = _bounds(touch.region)
        met = np.flatnonzero(((lo < high) & (low < hi)).all(axis=1))
        tasks, starts = touch.region.boxes.by_box
        for i in met.tolist():
            nodes = touch.nodes[tasks[starts[i] : starts[i + 1]]]
            begin, end = np.maximum(lo[i], low) - low, np.minimum(hi[i], high) - low
            inside = tuple(map(slice, begin.tolist(), end.tolist()))
            parts.append(([inside], nodes, must(touch.region, region)))
    return _first_uncovered(order, readers, np.ones(tuple(high - low), bool), parts)


def _undelivered_runs(
    order: Order, region: Region, box: int, readers: np.ndarray, writers: Sequence[Touch]
) -> int | None:
    """Like `_undelivered`, but for writers that access the buffer with other dimensions than the
    reader, so ranges of elements are compared instead of boxes. For example, a matrix that is
    written in tiles is read as one row.
    """
    size = region.boxes.itemsize
    first, last = (region.base + int(v[box]) for v in (region.boxes.begin, region.boxes.end))

    def inside(of: Region, row: int) -> list[tuple[slice, ...]]:
        starts, length = of.runs(row)
        begin = np.maximum(starts, first) - first
        end = np.minimum(starts + length, last) - first
        pairs = zip((-(-begin // size)).tolist(), (end // size).tolist(), strict=True)
        return [(slice(a, b),) for a, b in pairs if a < b]

    wanted = np.zeros((last - first) // size, bool)
    for place in inside(region, box):
        wanted[place] = True
    parts: list[_Part] = []
    for touch in writers:
        boxes, base = touch.region.boxes, touch.region.base
        met = np.flatnonzero((boxes.begin + base < last) & (first < boxes.end + base))
        tasks, starts = boxes.by_box
        for i in met.tolist():
            nodes = touch.nodes[tasks[starts[i] : starts[i + 1]]]
            parts.append((inside(touch.region, i), nodes, must(touch.region, region)))
    return _first_uncovered(order, readers, wanted, parts)


def _first_uncovered(
    order: Order, readers: np.ndarray, wanted: np.ndarray, parts: Sequence[_Part]
) -> int | None:
    """The first reader that may start before all wanted elements are written. None if there is no
    such reader. Of the writes in `parts`, only those that are complete when a reader starts count
    for this reader.
    """
    if not parts:
        return int(readers[0])
    covered: dict[bytes, bool] = {}  # by the set of parts that are complete
    sizes = [len(n) for _, n, _ in parts]
    nodes = np.concatenate([n for _, n, _ in parts])
    which, starts = np.repeat([w for *_, w in parts], sizes), np.cumsum([0, *sizes[:-1]])
    for reader in readers.tolist():
        there = order.before(nodes, np.full(len(nodes), reader), which)
        there = np.logical_or.reduceat(there, starts)
        if there.tobytes() not in covered:
            left = wanted.copy()
            for (places, *_), here in zip(parts, there.tolist(), strict=True):
                for place in places if here else ():
                    left[place] = False
            covered[there.tobytes()] = not left.any()
        if not covered[there.tobytes()]:
            return int(reader)
    return None
