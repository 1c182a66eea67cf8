"""Determines which boxes share bytes if their operands have different dimensions. Called by
ark.plan.access.

The bytes of a box are combs: equally long ranges, at equal distances. Most boxes are a single comb;
a box of part of a channel of several images, for example, has a comb for each image. Combs are
compared exactly, many pairs at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

MAX_COMB_PAIRS = 1 << 20  # pairs compared at once, which bounds the memory that this takes


@dataclass(frozen=True, eq=False)
class Combs:
    """The bytes of several boxes, in arrays with a row for each box. A comb of box i has count[i]
    ranges of length[i] bytes, which begin step[i] bytes apart. outer: arrays of shape (boxes,
    dimensions). The box has outer[i, d] equal combs along dimension d, strides[d] bytes apart.
    """

    count: np.ndarray
    step: np.ndarray
    length: np.ndarray
    outer: np.ndarray
    strides: Sequence[int]

    @cached_property
    def many(self) -> np.ndarray:
        """The number of combs of each box."""
        return np.asarray(self.outer.prod(axis=1))

    def starts(self, boxes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The first byte of comb number numbers[i] of box boxes[i], relative to the box's first."""
        start = np.zeros(len(boxes), np.int64)
        for d in np.flatnonzero(self.outer.max(axis=0, initial=1) > 1)[::-1].tolist():
            sizes = self.outer[boxes, d]
            start += numbers % sizes * self.strides[d]
            numbers = numbers // sizes
        return start


def combs(sizes: np.ndarray, strides: Sequence[int], itemsize: int) -> Combs:
    """The combs of boxes. sizes: the boxes' sizes in items, of shape (boxes, dimensions). strides:
    bytes from one index of a dimension to the next. itemsize: bytes of an item.
    """
    length = np.full(len(sizes), itemsize, np.int64)
    count, step = np.ones_like(length), np.ones_like(length)
    outer = np.ones_like(sizes)
    solid, simple = np.ones(len(sizes), bool), np.ones(len(sizes), bool)
    for d in range(sizes.shape[1] - 1, -1, -1):
        many, stride = sizes[:, d] > 1, strides[d]
        joined = many & solid & (length == stride)
        length = np.where(joined, length * sizes[:, d], length)
        opened = many & simple & ~joined & (count == 1)
        longer = many & simple & ~joined & (count > 1) & (count * step == stride)
        step = np.where(opened, stride, step)
        count = np.where(opened | longer, count * sizes[:, d], count)
        inside = ~many | joined | opened | longer
        outer[:, d] = np.where(inside, 1, sizes[:, d])
        solid &= ~many | joined
        simple &= inside
    return Combs(count, step, length, outer, strides)


def share(a: Combs, b: Combs, rows: np.ndarray, columns: np.ndarray, gap: np.ndarray) -> np.ndarray:
    """For each i, True if box rows[i] of `a` and box columns[i] of `b` share a byte. gap: the bytes
    from the first byte of the one to the first byte of the other.
    """
    shared = np.zeros(len(rows), bool)
    ends = np.cumsum(a.many[rows] * b.many[columns])
    total = int(ends[-1]) if len(ends) else 0
    for begin in range(0, total, MAX_COMB_PAIRS):
        place = np.arange(begin, min(begin + MAX_COMB_PAIRS, total))
        pair = np.searchsorted(ends, place, "right")
        row, column = rows[pair], columns[pair]
        number, theirs = ends[pair] - 1 - place, b.many[column]
        ahead = b.starts(column, number % theirs) - a.starts(row, number // theirs)
        mine = [v[row] for v in (a.count, a.step, a.length)]
        other = [v[column] for v in (b.count, b.step, b.length)]
        shared[pair[_combs_share(mine, other, gap[pair] + ahead)]] = True
    return shared


def _combs_share(a: list[np.ndarray], b: list[np.ndarray], gap: np.ndarray) -> np.ndarray:
    """True where two combs share a byte: comb i of a has a[0][i] ranges of a[2][i] bytes, a[1][i]
    bytes apart. b begins `gap` bytes after a.
    """
    shared = np.zeros(len(gap), bool)
    same = (a[0] == 1) | (b[0] == 1) | (a[1] == b[1])
    shared[same] = _same_step([v[same] for v in a], [v[same] for v in b], gap[same])
    # If the steps of two combs differ, the comb with fewer ranges is divided: each of its ranges is
    # compared with the whole other comb.
    unlike = np.flatnonzero(~same)
    fewer = a[0][unlike] <= b[0][unlike]
    few = [np.where(fewer, x[unlike], y[unlike]) for x, y in zip(a, b, strict=True)]
    more = [np.where(fewer, y[unlike], x[unlike]) for x, y in zip(a, b, strict=True)]
    ahead = np.where(fewer, gap[unlike], -gap[unlike])
    one = np.ones_like(ahead)
    for place in range(int(few[0].max(initial=0))):
        met = _same_step([one, few[1], few[2]], more, ahead - place * few[1])
        shared[unlike] |= met & (place < few[0])
    return shared


def _same_step(a: list[np.ndarray], b: list[np.ndarray], gap: np.ndarray) -> np.ndarray:
    """True where two combs share a byte, as in `_combs_share`, if both have the same step or one of
    them is a single range. The test looks for a whole number of steps by which a range of a can be
    moved so that it overlaps a range of b.
    """
    step = np.where(a[0] > 1, a[1], b[1])
    least = np.maximum((gap - a[2]) // step + 1, 1 - b[0])
    most = np.minimum(-((-(gap + b[2])) // step) - 1, a[0] - 1)
    return np.asarray(least <= most)
