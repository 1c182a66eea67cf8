"""Where tasks touch memory, in coordinates that can be compared. Used by planner and verifier.

Two accesses are compared exactly, box against box, when they see the same buffer through the same
extents; otherwise by the byte interval that encloses them, which may find too much, never too
little. Planner and verifier share this file on purpose: what is a conflict must be one rule; how
conflicts are ordered is decided by one and checked by the other, separately.
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
        return (self.bytes_lo[:, None] < other.bytes_hi[None, :]) & (
            other.bytes_lo[None, :] < self.bytes_hi[:, None]
        )


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
