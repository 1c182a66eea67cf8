"""Sizes and index ranges of windows over an input, shared by convolutions, their products and pools
(ark.tasks.convolution, matmul_windows, pool).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec

from ark.plan.params import Size

Step = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Steps = Annotated[tuple[Step, ...], msgspec.Meta(min_length=1, max_length=3)]
Margin = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
Margins = Annotated[tuple[Margin, ...], msgspec.Meta(min_length=1, max_length=3)]
Sizes = Annotated[tuple[Size, ...], msgspec.Meta(min_length=1, max_length=3)]


class Windows(Protocol):
    """Sizes, strides, dilations and margins before an input of windows, one a dimension."""

    @property
    def size(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def dilation(self) -> tuple[int, ...]: ...
    @property
    def before(self) -> tuple[int, ...]: ...


class PlacedWindows(Windows, Protocol):
    """Windows that say how many places there are, one number a dimension."""

    @property
    def sizes(self) -> tuple[int, ...]: ...


def window_sizes(p: Windows) -> tuple[tuple[int, ...], ...]:
    """Size, stride, dilation and margin, each by dimension."""
    return p.size, p.stride, p.dilation, p.before


def index_ranges(sizes: Sequence[int], first: int, end: int) -> list[tuple[int, int]]:
    """By dimension of `sizes` the first and the last index of places from `first` on, below `end`;
    places are counted as rows of memory are.
    """
    ranges: list[tuple[int, int]] = []
    last = end - 1
    whole = False  # a run of several indices further out has all of these
    for d, n in enumerate(sizes):
        step = math.prod(sizes[d + 1 :])
        a, b = first // step % n, last // step % n
        ranges.append((0, n - 1) if whole else (a, b))
        whole = whole or a != b
    return ranges


def reached(
    p: Windows, sizes: Sequence[int], ranges: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """The box of an input's spatial indices, of `sizes`, that the windows of these places reach;
    at least one index of each.
    """
    low: list[int] = []
    high: list[int] = []
    for d, ((first, last), n) in enumerate(zip(ranges, sizes, strict=True)):
        begin = first * p.stride[d] - p.before[d]
        end = last * p.stride[d] - p.before[d] + (p.size[d] - 1) * p.dilation[d]
        low.append(min(max(begin, 0), n - 1))
        high.append(max(min(end, n - 1), 0) + 1)
    return low, high
