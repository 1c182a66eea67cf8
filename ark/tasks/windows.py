"""Sizes and index ranges of windows of an input, shared by convolutions, products with windows and
pooling (ark.tasks.convolution, matmul_windows, pool).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec

from ark.plan.params import Size
from ark.plan.signature import Signature
from ark.tasks.text import VECTOR_BYTES

Step = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Steps = Annotated[tuple[Step, ...], msgspec.Meta(min_length=1, max_length=3)]
Margin = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
Margins = Annotated[tuple[Margin, ...], msgspec.Meta(min_length=1, max_length=3)]
Sizes = Annotated[tuple[Size, ...], msgspec.Meta(min_length=1, max_length=3)]


class Windows(Protocol):
    """Windows of an input, as of a convolution or pooling: their sizes, strides and dilations and
    the padding before the input. Each field has one number per spatial dimension.
    """

    @property
    def size(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def dilation(self) -> tuple[int, ...]: ...
    @property
    def before(self) -> tuple[int, ...]: ...


class PlacedWindows(Windows, Protocol):
    """Windows, and the number of windows in each dimension, which is the size of the result."""

    @property
    def sizes(self) -> tuple[int, ...]: ...


def window_sizes(p: Windows) -> tuple[tuple[int, ...], ...]:
    """(size, stride, dilation, padding before the input), each with one number per dimension."""
    return p.size, p.stride, p.dilation, p.before


def index_ranges(sizes: Sequence[int], first: int, end: int) -> list[tuple[int, int]]:
    """For each dimension of `sizes` the first and the last index of the elements `first` to `end` -
    1, which are numbered in row-major order.
    """
    ranges: list[tuple[int, int]] = []
    last = end - 1
    whole = False  # True after a dimension with several indices; inner dimensions then have all
    for d, n in enumerate(sizes):
        step = math.prod(sizes[d + 1 :])
        a, b = first // step % n, last // step % n
        ranges.append((0, n - 1) if whole else (a, b))
        whole = whole or a != b
    return ranges


def reached(
    p: Windows, sizes: Sequence[int], ranges: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """The box of pixels that a range of windows reads from an image with spatial sizes `sizes`: the
    first index in each dimension, and the index after the last. It has at least one index per
    dimension. ranges: the first and the last window in each dimension.
    """
    low: list[int] = []
    high: list[int] = []
    for d, ((first, last), n) in enumerate(zip(ranges, sizes, strict=True)):
        begin = first * p.stride[d] - p.before[d]
        end = last * p.stride[d] - p.before[d] + (p.size[d] - 1) * p.dilation[d]
        low.append(min(max(begin, 0), n - 1))
        high.append(max(min(end, n - 1), 0) + 1)
    return low, high


def spans(p: Windows, rows: int, columns: int) -> tuple[int, int]:
    """The numbers of rows and of columns of the image that a box of `rows` by `columns` results
    reads.
    """
    return (
        (rows - 1) * p.stride[0] + (p.size[0] - 1) * p.dilation[0] + 1,
        (columns - 1) * p.stride[1] + (p.size[1] - 1) * p.dilation[1] + 1,
    )


def vector(p: Windows, tile: Sequence[int], sig: Signature) -> int:
    """The number of neighbouring results in the last dimension that a thread computes together. It
    is a vector of VECTOR_BYTES if windows have size 1 in that dimension and the rows of all
    operands, of one type, consist of whole vectors; otherwise 1.
    """
    out = sig.operands[-1]
    plain = (p.size[-1], p.stride[-1], p.dilation[-1], p.before[-1]) == (1, 1, 1, 0)
    many = VECTOR_BYTES // out.itemsize
    counts = [n for o in sig.operands for n in (o.shape[-1], *o.strides[:-1])] + [tile[3]]
    beside = all(o.strides[-1] == 1 and o.dtype == out.dtype for o in sig.operands)
    return many if plain and beside and all(n % many == 0 for n in counts) else 1
