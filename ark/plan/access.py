"""Where tasks touch memory, in coordinates that can be compared. Used by planner and verifier.

Accesses are compared exactly: box against box when they see the same buffer through the same
extents, byte range against byte range otherwise. The planner relies on exactness: it forgets an
access that later writes have covered. Planner and verifier share this file on purpose: what is a
conflict must be one rule; how conflicts are ordered is decided by one and checked by the other,
separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ark.plan.types import PlanBuffer, PlanTensor
from ark.tasks.kind import Access

DIMS = 4


@dataclass(frozen=True)
class Frame:
    """How a buffer is indexed: boxes in equal frames can be compared."""

    buffer: int
    extents: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class Region:
    """The accesses of one op to one operand: row i is the box of task tasks[i].

    space: the (arena, rank) whose offsets `bytes_lo` and `bytes_hi` count. frame: boxes of equal
    frames are comparable. lo, hi: (n, 4) in buffer elements.
    """

    space: tuple[str, int, int]
    frame: Frame
    buffer: int
    write: bool
    past: bool
    packet: bool
    tasks: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    bytes_lo: np.ndarray
    bytes_hi: np.ndarray

    @cached_property
    def begin(self) -> int:
        return int(self.bytes_lo.min())

    @cached_property
    def end(self) -> int:
        return int(self.bytes_hi.max())

    def meets(self, other: Region) -> bool:
        """Can the two conflict at all: one writes, and they are not a cache's past and its growth."""
        return (self.write or other.write) and not (
            self.past and other.past and self.write != other.write
        )

    def overlaps(self, other: Region) -> np.ndarray:
        """(len(self.tasks), len(other.tasks)) of bool: which boxes share bytes."""
        if self.frame == other.frame:
            below = self.lo[:, None, :] < other.hi[None, :, :]
            above = other.lo[None, :, :] < self.hi[:, None, :]
            return np.asarray((below & above).all(axis=2))
        hits = (self.bytes_lo[:, None] < other.bytes_hi[None, :]) & (
            other.bytes_lo[None, :] < self.bytes_hi[:, None]
        )
        rows, columns = np.nonzero(hits & ~(self.solid[:, None] & other.solid[None, :]))
        if len(rows):
            hits[rows, columns] = self._exact(other, rows, columns)
        return hits

    def _exact(self, other: Region, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """By pair of boxes: do they share a byte? Pairs of the same two shapes go together: they
        differ by their distance alone.
        """
        found = np.zeros(len(rows), bool)
        apart = other.bytes_lo[columns] - self.bytes_lo[rows]
        shapes = self._sizes[rows] * (len(other.tasks) + 1) + other._sizes[columns]
        order = np.argsort(shapes, kind="stable")
        for pairs in np.split(order, np.flatnonzero(np.diff(shapes[order])) + 1):
            row, column = int(rows[pairs[0]]), int(columns[pairs[0]])
            found[pairs] = _share(self.runs(row), other.runs(column), apart[pairs])
        return found

    @cached_property
    def _sizes(self) -> np.ndarray:
        """A number for each box's shape; equal shapes have equal numbers."""
        _, inverse = np.unique(self.hi - self.lo, axis=0, return_inverse=True)
        return np.asarray(inverse.reshape(-1))

    @cached_property
    def solid(self) -> np.ndarray:
        """Which boxes are one byte range."""
        sizes = np.prod(self.hi - self.lo, axis=1) * self.frame.itemsize
        return np.asarray(sizes == self.bytes_hi - self.bytes_lo)

    def runs(self, row: int) -> tuple[np.ndarray, int]:
        """(first bytes, length) of the byte ranges that a box consists of, in rising order."""
        if self.solid[row]:
            return self.bytes_lo[row : row + 1], int(self.bytes_hi[row] - self.bytes_lo[row])
        extents = _pad(self.frame.extents, 1)
        size = (self.hi[row] - self.lo[row]).tolist()
        strides = [self.frame.itemsize] * DIMS
        for d in range(DIMS - 2, -1, -1):
            strides[d] = strides[d + 1] * extents[d + 1]
        starts = self.bytes_lo[row : row + 1]
        length, solid = self.frame.itemsize, True
        for d in range(DIMS - 1, -1, -1):
            if solid and length == strides[d]:
                length *= size[d]
                continue
            solid = False
            steps = np.arange(size[d], dtype=np.int64) * strides[d]
            starts = (steps[:, None] + starts[None, :]).reshape(-1)
        return starts, length


def _share(a: tuple[np.ndarray, int], b: tuple[np.ndarray, int], apart: np.ndarray) -> np.ndarray:
    """Do two lists of disjoint rising ranges, each of one length, share a byte? For each distance
    from the first range of `a` to the first of `b`.
    """
    if len(a[0]) > len(b[0]):
        a, b, apart = b, a, -apart
    starts = (a[0] - a[0][0])[None, :] - apart[:, None]
    others = b[0] - b[0][0]
    last = np.searchsorted(others, starts + a[1], "left") - 1
    return np.asarray(((last >= 0) & (others[np.maximum(last, 0)] + b[1] > starts)).any(axis=1))


def _pad(values: Sequence[int], fill: int) -> tuple[int, ...]:
    return (fill,) * (DIMS - len(values)) + tuple(values)


def space_of(buffer: PlanBuffer) -> tuple[str, int, int]:
    """Buffers in one space may overlap; external and peer buffers are spaces of their own."""
    alone = buffer.arena == "external" or buffer.offset < 0
    return (buffer.arena, buffer.rank, buffer.id if alone else -1)


def regions(
    tensors: Sequence[PlanTensor],
    buffers: Sequence[PlanBuffer],
    itemsizes: Sequence[int],
    operands: Sequence[int],
    accesses: Sequence[tuple[int, Access]],
) -> list[Region]:
    """Groups an op's accesses, given as (task, access), by operand and direction.

    itemsizes: bytes per element of each tensor (8 for packets).
    """
    grouped: dict[tuple[int, bool, bool], list[tuple[int, Access]]] = {}
    for task, access in accesses:
        key = (operands[access.operand], access.write, access.past)
        grouped.setdefault(key, []).append((task, access))
    found = []
    for (tensor_id, write, past), rows in sorted(grouped.items()):
        tensor = tensors[tensor_id]
        buffer = buffers[tensor.buffer]
        itemsize = itemsizes[tensor_id]
        offsets = np.array(_pad(tensor.offsets, 0), np.int64)
        strides = np.array(_pad(tensor.strides, 0), np.int64)
        lo = np.array([_pad(a.lo, 0) for _, a in rows], np.int64) + offsets
        hi = np.array([_pad(a.hi, 1) for _, a in rows], np.int64) + offsets
        base = max(buffer.offset, 0)
        found.append(
            Region(
                space=space_of(buffer),
                frame=Frame(tensor.buffer, tensor.extents, itemsize),
                buffer=tensor.buffer,
                write=write,
                past=past,
                packet=tensor.packet,
                tasks=np.array([t for t, _ in rows], np.int64),
                lo=lo,
                hi=hi,
                bytes_lo=base + (lo * strides).sum(axis=1) * itemsize,
                bytes_hi=base + (((hi - 1) * strides).sum(axis=1) + 1) * itemsize,
            )
        )
    return found
