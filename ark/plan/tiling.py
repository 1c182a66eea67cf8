"""How an output is cut into tiles: enough for all processors, none so small that a hand-over costs
more than the work. Called by the ops' lowerings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ark.plan.machine import Machine

MIN_TILE = 2048
PAIRED = ("swiglu", "rope_kv")  # epilogues that need two neighbouring rows in one stage


def box_tile(shape: Sequence[int], machine: Machine, fixed: int | None = None) -> list[int]:
    """Tile sizes for an elementwise result of four dimensions; dimension `fixed` is cut to 1."""
    want = max(MIN_TILE, math.ceil(math.prod(shape) / machine.processors))
    tile = [1, 1, 1, 1]
    for d in (3, 2, 1, 0):
        if d == fixed:
            continue
        room = max(1, want // math.prod(tile))
        if shape[d] <= room:
            tile[d] = shape[d]
            continue
        pieces = math.ceil(shape[d] / room)
        tile[d] = math.ceil(shape[d] / pieces)
        break
    return tile


def box_coords(shape: Sequence[int], tile: Sequence[int]) -> list[tuple[int, ...]]:
    """First indices of all tiles, the last dimension fastest."""
    return list(itertools.product(*(range(0, n, s) for n, s in zip(shape, tile, strict=True))))


def split(total: int, parts: int) -> list[tuple[int, int]]:
    """Cuts range(total) into at most `parts` ranges whose lengths differ by at most one."""
    parts = max(1, min(total, parts))
    return [(total * i // parts, total * (i + 1) // parts) for i in range(parts)]
