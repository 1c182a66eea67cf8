"""Folds shapes of more than four dimensions to four: all dimensions before the last three become
one.

A tile (the part of a result that one task computes) always has four sizes, and a device function
four loops. For a tensor with more dimensions, the first loop counts through all leading dimensions
as if they were one; the separate indices are computed from this count where they are needed
(ark.tasks.text). The leading indices of a tile must form a rectangular box in these dimensions
(`block`). Called by the ops' lowerings (through ark.lower.tiling) and by the task kinds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MAX_FOLDED_DIMS = 4
# Tiles begin at multiples of this number of elements, so that whole cache lines are accessed.
CACHE_LINE_ELEMENTS = 64


def pad(values: Sequence[int], fill: int) -> tuple[int, ...]:
    """The values, padded at the left to four; unchanged if there are four or more."""
    return (fill,) * (MAX_FOLDED_DIMS - len(values)) + tuple(values)


def fold(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """The shape's four folded sizes."""
    full = pad(shape, 1)
    cut = len(full) - MAX_FOLDED_DIMS + 1
    return (math.prod(full[:cut]), *full[cut:])  # type: ignore[return-value]


def leading(shape: Sequence[int]) -> tuple[int, ...]:
    """The sizes of the dimensions that are folded into the first of the four."""
    full = pad(shape, 1)
    return full[: len(full) - MAX_FOLDED_DIMS + 1]


def block(shape: Sequence[int], most: int) -> int:
    """Returns the largest size of tiles of the folded dimension, at most `most`, with which every
    tile is a block. The folded dimension stands for all leading dimensions of `shape`. A tile of it
    is a block if its indices form a rectangular box in the separate leading dimensions. Tiles begin
    at multiples of their size.
    """
    size = 1
    for place, n in reversed(list(enumerate(leading(shape)))):
        room = max(1, most // size)
        if n > room:
            # A tile of the outermost dimension may end at any index; the tiles of the other
            # dimensions must be equal parts.
            return size * (room if place == 0 else max(t for t in range(1, room + 1) if n % t == 0))
        size *= n
    return size


def is_block(shape: Sequence[int], size: int) -> bool:
    """True if tiles of this size in the leading dimensions, counted as one dimension, form boxes in
    the separate dimensions.
    """
    return block(shape, size) == size


def unfold(
    shape: Sequence[int], lo: Sequence[int], hi: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A box in the four folded dimensions as a box in all dimensions of the shape; its part in the
    leading dimensions must be a block.
    """
    rank = len(shape)
    if rank <= MAX_FOLDED_DIMS:
        return tuple(lo[MAX_FOLDED_DIMS - rank : MAX_FOLDED_DIMS]), tuple(
            hi[MAX_FOLDED_DIMS - rank : MAX_FOLDED_DIMS]
        )
    first, last = lo[0], hi[0] - 1
    low: list[int] = []
    high: list[int] = []
    for n in reversed(leading(shape)):
        low.append(first % n)
        high.append(last % n + 1)
        first, last = first // n, last // n
    return (*reversed(low), *lo[1:MAX_FOLDED_DIMS]), (*reversed(high), *hi[1:MAX_FOLDED_DIMS])


def tile_of(full: Sequence[int], want: int) -> list[int]:
    """Four tile sizes for a result with the folded sizes `full`. A tile has about `want` elements,
    and no more in any dimension than the result has.
    """
    shape = fold(full)
    tile = [1, 1, 1, 1]
    for d in (3, 2, 1, 0):
        room = math.ceil(want / math.prod(tile))
        if shape[d] <= room:
            tile[d] = shape[d]
            continue
        pieces = math.ceil(shape[d] / room)
        tile[d] = math.ceil(shape[d] / pieces)
        if d == 3:
            tile[d] = min(shape[d], -(-tile[d] // CACHE_LINE_ELEMENTS) * CACHE_LINE_ELEMENTS)
        break
    tile[0] = block(full, tile[0])
    return tile


def split(total: int, parts: int) -> list[tuple[int, int]]:
    """Cuts range(total) into at most `parts` ranges whose lengths differ by at most one."""
    parts = max(1, min(total, parts))
    return [(total * i // parts, total * (i + 1) // parts) for i in range(parts)]
