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

from ark.ir.values import row_major
from ark.plan.kind import Access
from ark.plan.types import PlanBuffer, PlanTensor

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
        """Can they conflict at all: one writes, and they are no cache's past and its growth."""
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
        if rows.size:
            hits[rows, columns] = self._share(other, rows, columns)
        return hits

    @cached_property
    def solid(self) -> np.ndarray:
        """Which boxes are one byte range."""
        sizes = np.prod(self.hi - self.lo, axis=1) * self.frame.itemsize
        return np.asarray(sizes == self.bytes_hi - self.bytes_lo)

    @cached_property
    def _strides(self) -> list[int]:
        """Bytes per step of each dimension."""
        return [s * self.frame.itemsize for s in row_major(_pad(self.frame.extents, 1))]

    @cached_property
    def _combs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Boxes as `count` ranges of `length` bytes, `step` apart; and which are that simple."""
        size = self.hi - self.lo
        length = np.full(len(size), self.frame.itemsize, np.int64)
        count, step = np.ones_like(length), np.ones_like(length)
        solid, simple = np.ones(len(size), bool), np.ones(len(size), bool)
        for d in range(DIMS - 1, -1, -1):
            many, stride = size[:, d] > 1, self._strides[d]
            joined = many & solid & (length == stride)
            length = np.where(joined, length * size[:, d], length)
            opened = many & ~joined & (count == 1)
            longer = many & ~joined & (count > 1) & (count * step == stride)
            simple &= ~many | joined | opened | longer
            step = np.where(opened, stride, step)
            count = np.where(opened | longer, count * size[:, d], count)
            solid &= ~many | joined
        return count, step, length, simple

    def _share(self, other: Region, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """For pairs of boxes: do they share a byte?"""
        *mine, simple1 = (v[rows] for v in self._combs)
        *theirs, simple2 = (v[columns] for v in other._combs)
        apart = other.bytes_lo[columns] - self.bytes_lo[rows]
        shared = np.zeros(len(rows), bool)
        alike = (mine[0] == 1) | (theirs[0] == 1) | (mine[1] == theirs[1])
        shared[alike] = _meet_combs(
            [v[alike] for v in mine], [v[alike] for v in theirs], apart[alike]
        )
        # Combs of two steps: the ranges of the one with fewer, one at a time.
        unlike = np.flatnonzero(~alike)
        fewer = mine[0][unlike] <= theirs[0][unlike]
        few = [np.where(fewer, a[unlike], b[unlike]) for a, b in zip(mine, theirs, strict=True)]
        more = [np.where(fewer, b[unlike], a[unlike]) for a, b in zip(mine, theirs, strict=True)]
        ahead = np.where(fewer, apart[unlike], -apart[unlike])
        one = np.ones_like(ahead)
        for place in range(int(few[0].max(initial=0))):
            met = _meet_combs([one, few[1], few[2]], more, ahead - place * few[1])
            shared[unlike] |= met & (place < few[0])
        for i in np.flatnonzero(~(simple1 & simple2)):
            shared[i] = _meet(self.runs(int(rows[i])), other.runs(int(columns[i])))
        return shared

    def runs(self, row: int) -> tuple[np.ndarray, int]:
        """(first bytes, length) of the byte ranges that a box consists of, in rising order."""
        size = (self.hi[row] - self.lo[row]).tolist()
        starts = self.bytes_lo[row : row + 1]
        length, solid = self.frame.itemsize, True
        for d in range(DIMS - 1, -1, -1):
            if solid and length == self._strides[d]:
                length *= size[d]
                continue
            solid = False
            steps = np.arange(size[d], dtype=np.int64) * self._strides[d]
            starts = (steps[:, None] + starts[None, :]).reshape(-1)
        return starts, length


def _meet_combs(a: list[np.ndarray], b: list[np.ndarray], apart: np.ndarray) -> np.ndarray:
    """(count, step, length) against the same, b `apart` bytes behind a, of one step or one range:
    they meet where a whole number of steps between them brings two ranges together.
    """
    step = np.where(a[0] > 1, a[1], b[1])
    least = np.maximum((apart - a[2]) // step + 1, 1 - b[0])
    most = np.minimum(-((-(apart + b[2])) // step) - 1, a[0] - 1)
    return np.asarray(least <= most)


def _meet(a: tuple[np.ndarray, int], b: tuple[np.ndarray, int]) -> bool:
    """Do two lists of disjoint rising ranges, each of one length, share a byte?"""
    if len(a[0]) > len(b[0]):
        a, b = b, a
    last = np.searchsorted(b[0], a[0] + a[1], "left") - 1
    return bool(((last >= 0) & (b[0][np.maximum(last, 0)] + b[1] > a[0])).any())


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
