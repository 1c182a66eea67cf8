"""Determines which tasks access the same bytes. Used by the scheduler, which orders such tasks, and
by the verifier, which checks the order.

Two accesses are compared as boxes (rectangles of indices) if they refer to the same buffer with the
same dimensions, otherwise as byte ranges. Both comparisons are exact. An approximation would not
do: an access is dropped from the search once later writes cover it (ark.plan.frontier), which is
only correct for bytes that the writes certainly cover.

The scheduler and the verifier share this module on purpose, so that one rule defines conflicts. The
scheduler then decides the order of conflicting tasks, and the verifier checks that order
independently.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from ark.ir.values import row_major
from ark.plan.boxes import Boxes, candidates
from ark.plan.combs import Combs, combs, share
from ark.plan.types import PlanBuffer, PlanTensor

MAX_DIRECT_BOX_PAIRS = 1 << 16  # pairs up to which all are compared, without sorting
ONE = np.zeros(1, np.int64)
NONE = np.zeros(0, np.int64)
Pairs = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Groups:
    """The pairs of tasks of two ops that access the same bytes. They are stored as groups. In group
    i, each task of mine[i] (tasks of one op) shares bytes with each task of theirs[i] (tasks of the
    other op). The task numbers in mine[i] and theirs[i] are in rising order. A task that touches
    several boxes may be in several groups.
    """

    theirs: list[np.ndarray]
    mine: list[np.ndarray]

    @cached_property
    def my_names(self) -> list[bytes]:
        """For each group of conflicting accesses, this op's tasks, encoded as bytes."""
        return [tasks.tobytes() for tasks in self.mine]

    @cached_property
    def their_names(self) -> list[bytes]:
        """For each group of conflicting accesses, the other op's tasks, encoded as bytes."""
        return [tasks.tobytes() for tasks in self.theirs]

    @cached_property
    def mine_listed(self) -> list[list[int]]:
        """For each group of conflicting accesses, this op's tasks, as a list."""
        return [tasks.tolist() for tasks in self.mine]

    @cached_property
    def joined(self) -> tuple[Pairs, Pairs]:
        """Two lists of pairs: (task of the other op, number of its group) and (task of this op,
        number of its group).
        """
        return _joined(self.theirs), _joined(self.mine)


def _joined(lists: Sequence[np.ndarray]) -> Pairs:
    if not lists:
        return NONE, NONE
    return np.concatenate(lists), np.repeat(np.arange(len(lists)), [len(x) for x in lists])


@dataclass(frozen=True, eq=False)
class Region:
    """All reads, or all writes, of one operand by the tasks of one op. space: the address space,
    for example an arena in which buffers may overlap. memory: the buffer. If two operands in one
    buffer have the same extents and element size, their boxes are compared by indices. base: bytes
    from the start of the address space to the operand's first element. offsets: the indices of the
    operand's first element in the buffer.
    """

    op: int
    boxes: Boxes
    space: Hashable
    memory: Hashable
    extents: tuple[int, ...]
    offsets: tuple[int, ...]
    base: int
    packet: bool
    pretended: bool = False

    @property
    def write(self) -> bool:
        return self.boxes.write

    @property
    def begin(self) -> int:
        return self.base + self.boxes.first

    @property
    def end(self) -> int:
        return self.base + self.boxes.last

    def meets(self, other: Region) -> bool:
        """True if the two accesses can conflict. At least one of them must write. Three pairs of
        accesses never conflict: an append to a cache and a read of the cache's older rows; two
        appends of different rows by one op; and two accesses of one op to tiles that processors
        claim at run time, because each tile is claimed once.
        """
        mine, theirs = self.boxes, other.boxes
        if mine.claimed and theirs.claimed and self.op == other.op:
            return False
        if not (mine.write or theirs.write):
            return False
        if not (mine.append_only and theirs.append_only):
            return True
        (first, last), (begin, end) = mine.appended, theirs.appended
        apart = self.op == other.op and (last <= begin or end <= first)
        return mine.write == theirs.write and not apart

    def same_frame(self, other: Region) -> bool:
        """True where the boxes of both regions can be compared directly: they are in the same
        buffer with equal dimensions and equally large elements.
        """
        return (
            self.memory == other.memory
            and self.extents == other.extents
            and self.boxes.itemsize == other.boxes.itemsize
        )

    def covers(self, other: Region) -> bool:
        """True if the boxes of this region certainly contain every element of the other region's
        boxes.
        """
        if not self.boxes.fills_bounds or not self.same_frame(other):
            return False
        low, high = self.boxes.bounds
        inner_low, inner_high = other.boxes.bounds
        shift = self._padded([a - b for a, b in zip(other.offsets, self.offsets, strict=True)])
        return all(
            a <= c + s and d + s <= b
            for a, b, c, d, s in zip(low, high, inner_low, inner_high, shift, strict=True)
        )

    def overlaps(self, other: Region) -> Pairs:
        """The pairs (index of a box of this region, index of a box of the other region) that share
        bytes, in no particular order.
        """
        a, b = self.boxes, other.boxes
        distance = other.base - self.base
        solid = a.all_solid and b.all_solid
        if a.single and b.single and solid:
            met = a.first < b.last + distance and b.first + distance < a.last
            return (ONE, ONE) if met else (NONE, NONE)
        key = (b, distance, self._frame_shift(other))
        if key not in a.met:
            a.met[key] = self._find(other, distance)
        return cast(Pairs, a.met[key])

    def _frame_shift(self, other: Region) -> object:
        """A key for caching overlaps: regions with an equal key, and an equal distance in bytes,
        have the same pairs of overlapping boxes.
        """
        if self.same_frame(other):
            return tuple(o - s for o, s in zip(other.offsets, self.offsets, strict=True))
        return (self.extents, other.extents)

    def tasks_met(self, other: Region) -> list[tuple[int, np.ndarray, bytes]]:
        """For each box of this region that shares bytes with the other region, a tuple: the number
        of the box, the tasks of the other region that access the shared bytes, and the same tasks
        encoded as bytes (as a key for dicts).
        """
        key = ("tasks", other.boxes, other.base - self.base, self._frame_shift(other))
        if key not in self.boxes.met:
            self.boxes.met[key] = self._group(other)
        return cast("list[tuple[int, np.ndarray, bytes]]", self.boxes.met[key])

    def tasks_after(self, other: Region) -> Groups:
        """The tasks of this region, grouped by the set of tasks of the other region with which they
        share bytes.
        """
        key = ("groups", other.boxes, other.base - self.base, self._frame_shift(other))
        if key not in self.boxes.met:
            tasks, starts = self.boxes.by_box
            by_key: dict[bytes, tuple[np.ndarray, list[np.ndarray]]] = {}
            for box, met, name in self.tasks_met(other):
                by_key.setdefault(name, (met, []))[1].append(tasks[starts[box] : starts[box + 1]])
            self.boxes.met[key] = Groups(
                [met for met, _ in by_key.values()],
                [np.unique(np.concatenate(parts)) for _, parts in by_key.values()],
            )
        return cast(Groups, self.boxes.met[key])

    def _group(self, other: Region) -> list[tuple[int, np.ndarray, bytes]]:
        rows, columns = self.overlaps(other)
        if not len(rows):
            return []
        tasks, starts = other.boxes.by_box
        order = np.argsort(rows, kind="stable")
        rows, columns = rows[order], columns[order]
        cuts = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist(), len(rows)]
        groups: list[tuple[int, np.ndarray, bytes]] = []
        known: dict[bytes, tuple[np.ndarray, bytes]] = {}
        for begin, end in itertools.pairwise(cuts):
            touched = np.sort(columns[begin:end])
            key = touched.tobytes()
            if key not in known:
                parts = [tasks[starts[c] : starts[c + 1]] for c in touched.tolist()]
                members = np.unique(np.concatenate(parts))
                known[key] = (members, members.tobytes())
            groups.append((int(rows[begin]), *known[key]))
        return groups

    def _find(self, other: Region, distance: int) -> Pairs:
        a, b = self.boxes, other.boxes
        solid = a.all_solid and b.all_solid
        if len(a.lo) * len(b.lo) <= MAX_DIRECT_BOX_PAIRS:
            grid = np.indices((len(a.lo), len(b.lo))).reshape(2, -1)
            pieces = [(grid[0], grid[1])]
        elif not solid and self.same_frame(other):
            d = b.sharpest
            shift = self._padded(other.offsets)[d] - self._padded(self.offsets)[d]
            pieces = candidates(a.lo[:, d], a.hi[:, d], b.lo[:, d] + shift, b.hi[:, d] + shift)
        else:
            pieces = candidates(a.begin, a.end, b.begin + distance, b.end + distance)
        kept = [self._meet(other, rows, columns, distance) for rows, columns in pieces]
        if len(kept) == 1:
            return kept[0]
        return np.concatenate([r for r, _ in kept]), np.concatenate([c for _, c in kept])

    def _meet(self, other: Region, rows: np.ndarray, columns: np.ndarray, distance: int) -> Pairs:
        """The pairs of boxes that share bytes, among the candidates (box rows[i] of this region,
        box columns[i] of the other one). distance: bytes from this region's base to the other's.
        """
        a, b = self.boxes, other.boxes
        begin, end = b.begin[columns] + distance, b.end[columns] + distance
        met = (a.begin[rows] < end) & (begin < a.end[rows])
        rows, columns = rows[met], columns[met]
        if (a.all_solid and b.all_solid) or not len(rows):
            return rows, columns
        if self.same_frame(other):
            shift = np.array(
                self._padded([o - s for o, s in zip(other.offsets, self.offsets, strict=True)])
            )
            below = a.lo[rows] < b.hi[columns] + shift
            met = (below & (b.lo[columns] + shift < a.hi[rows])).all(axis=1)
            return rows[met], columns[met]
        unsure = np.flatnonzero(~(a.solid[rows] & b.solid[columns]))
        met = np.ones(len(rows), bool)
        gap = b.begin[columns] + distance - a.begin[rows]
        met[unsure] = share(self.combs, other.combs, rows[unsure], columns[unsure], gap[unsure])
        return rows[met], columns[met]

    def _padded(self, offsets: Sequence[int]) -> tuple[int, ...]:
        """The offsets with zeros in front, so that there is one for each dimension of the boxes."""
        return (0,) * (self.boxes.dims - len(offsets)) + tuple(offsets)

    @cached_property
    def _strides(self) -> list[int]:
        """For each dimension, the bytes from one index to the next."""
        padded = (1,) * (self.boxes.dims - len(self.extents)) + self.extents
        return [s * self.boxes.itemsize for s in row_major(padded)]

    @cached_property
    def combs(self) -> Combs:
        """The bytes of the boxes, as ranges at equal distances."""
        return combs(self.boxes.hi - self.boxes.lo, self._strides, self.boxes.itemsize)

    def runs(self, row: int) -> tuple[np.ndarray, int]:
        """The byte ranges of a box in its address space: the first byte of each, in rising order,
        and their common length.
        """
        size = (self.boxes.hi[row] - self.boxes.lo[row]).tolist()
        starts = self.base + self.boxes.begin[row : row + 1]
        length, solid = self.boxes.itemsize, True
        for d in range(self.boxes.dims - 1, -1, -1):
            if solid and length == self._strides[d]:
                length *= size[d]
                continue
            solid = False
            steps = np.arange(size[d], dtype=np.int64) * self._strides[d]
            starts = (steps[:, None] + starts[None, :]).reshape(-1)
        return starts, length


def space_of(buffer: PlanBuffer) -> tuple[str, int, int]:
    """A key for the address space of a buffer. Buffers with the same key may overlap. Each buffer
    of the caller or of a peer has its own address space.
    """
    alone = buffer.arena == "external" or buffer.offset < 0
    return (buffer.arena, buffer.rank, buffer.id if alone else -1)


def region(
    op: int, boxes: Boxes, tensor: PlanTensor, buffer: PlanBuffer, pretended: bool = False
) -> Region:
    """All reads, or all writes, by the tasks of an op, of one operand of the op, as a Region."""
    items = tensor.items
    return Region(
        op,
        boxes,
        space_of(buffer),
        tensor.buffer,
        items.extents,
        items.offsets,
        max(buffer.offset, 0) + items.start * boxes.itemsize,
        tensor.packet,
        pretended,
    )
