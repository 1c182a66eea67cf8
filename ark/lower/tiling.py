"""How an output is cut into tiles: enough for all processors, none so small that a hand-over costs
more than the work. Called by the ops' lowerings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ark.ir.values import Tensor
from ark.machine import Machine
from ark.variant import COMMUNICATE

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


def stage_rows(weight: Tensor, machine: Machine, paired: bool) -> int:
    """Rows of weights in one stage: as many as fit, a power of two, at least a pair if paired."""
    rows = 2 if paired else 1
    while rows < 4 and 2 * rows * row_bytes(weight) <= machine.stage_bytes:
        rows *= 2
    return rows


def row_pieces(rows: int, weight: Tensor, machine: Machine) -> int:
    """Stages that a row of weights takes on the operand stream; 0 if it cannot be streamed.

    rows: of the input. A stage holds whole rows. One of a row wider than that holds an equal piece
    of it, where the threads keep their slices of a single input row, even in number, in registers.
    """
    columns = weight.shape[1]
    if not machine.ring_bytes or row_bytes(weight) <= machine.stage_bytes:
        return 1
    if machine.variant.role(COMMUNICATE):
        # Pieces are different warps' there, and the input is in shared memory.
        least = -(-row_bytes(weight) // machine.stage_bytes) if rows == 1 else 0
        units = row_bytes(weight) // 16
        fits = (p for p in range(least, units + 1) if least and units % p == 0)
        return next(fits, 0) if row_bytes(weight) % 16 == 0 else 0
    share, rest = divmod(columns, machine.lanes * machine.warps)
    if rows != 1 or rest or share > machine.row_slice:
        return 0
    least = -(-row_bytes(weight) // machine.stage_bytes)
    return next((p for p in range(least, share) if share % (2 * p) == 0), 0)


def row_bytes(weight: Tensor) -> int:
    """Bytes of one row of a weight of two dimensions."""
    return weight.shape[1] * weight.dtype.itemsize


def split(total: int, parts: int) -> list[tuple[int, int]]:
    """Cuts range(total) into at most `parts` ranges whose lengths differ by at most one."""
    parts = max(1, min(total, parts))
    return [(total * i // parts, total * (i + 1) // parts) for i in range(parts)]
