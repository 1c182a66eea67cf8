"""Views: a view is the part of a logical tensor that an operand reads or writes, as a box and a
share of the values.

A share (index, count) is one of `count` partial tensors that add up to the whole tensor. Two views
of a tensor conflict if their boxes overlap and the intervals of their shares overlap. Used
throughout ark.parallel.transform.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

Box = tuple[tuple[int, int], ...]
"""A box: for each dimension, the first index and the last index + 1."""


@dataclass(frozen=True)
class View:
    """A part of the logical tensor in a buffer of the one-device graph."""

    buffer: int
    box: Box
    share: tuple[int, int] = (0, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in self.box)

    @property
    def interval(self) -> tuple[Fraction, Fraction]:
        """The share of the values as an interval of [0, 1), where [0, 1) stands for the whole
        value. For example, partial sum 1 of 4 is [1/4, 1/2).
        """
        index, count = self.share
        return Fraction(index, count), Fraction(index + 1, count)

    def cut(self, dimension: int, index: int, count: int) -> View:
        """One of `count` equal parts along a dimension."""
        begin, end = self.box[dimension]
        size = (end - begin) // count
        part = (begin + index * size, begin + (index + 1) * size)
        box = (*self.box[:dimension], part, *self.box[dimension + 1 :])
        return dataclasses.replace(self, box=box)

    def partial(self, index: int, count: int) -> View:
        """One of `count` partial tensors that add up to this view."""
        return dataclasses.replace(
            self, share=(self.share[0] * count + index, self.share[1] * count)
        )

    def meets(self, other: View) -> bool:
        """True if the views conflict: their boxes overlap, and so do their shares of the values."""
        if self.buffer != other.buffer:
            return False
        # Compares intervals without division.
        (index, count), (place, parts) = self.share, other.share
        if index * parts >= (place + 1) * count or place * count >= (index + 1) * parts:
            return False
        return meeting(self.box, other.box) is not None


def meeting(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes, or None if it is empty."""
    bounds = []
    for (p, q), (r, s) in zip(a, b, strict=True):
        begin, end = max(p, r), min(q, s)
        if begin >= end:
            return None
        bounds.append((begin, end))
    return tuple(bounds)


def part_of(whole: np.ndarray, view: View) -> np.ndarray:
    """A rank's part of an array that has the contents of a buffer of the one-device graph."""
    return whole[tuple(slice(*side) for side in view.box)]


def parts_of(
    held: Mapping[str, View], names: Mapping[str, str], values: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """A rank's parts of the named values that it holds, by buffer. held: the views of the rank's
    buffers, as in RankGraphs.held. names: the names of values by buffer. Buffers whose values are
    not in `values` are left out.
    """
    return {
        buffer: part_of(values[names[buffer]], view)
        for buffer, view in held.items()
        if names.get(buffer) in values
    }
