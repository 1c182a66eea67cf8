"""Properties of products whose right operand is a quantised matrix (a RowType, whose rows have
codes, scales and zero points). Matrix units multiply by it directly; its dequantised values are
never stored in memory. Used by lowering and by the backends' device functions.
"""

from __future__ import annotations

import math

from ark.ir.dtype import RowType, by_name
from ark.plan.kind import OperandType

MAX_ROWS = 64  # rows of the left operand
LINE_DEPTH = 64  # elements along k that a warp multiplies at once
STAGE_DEPTH = 256  # elements along k in a stage of shared memory
LANE_DEPTH = 16  # consecutive codes of a row that a lane converts at once
BOX_BYTES = 16  # rows of a box begin and end at multiples of this many bytes


def row_type(operand: OperandType) -> RowType | None:
    """The type of a quantised matrix; None for any other operand."""
    dtype = by_name(operand.dtype)
    return dtype if isinstance(dtype, RowType) else None


def served(dtype: RowType) -> bool:
    """True if device functions for matrix units can multiply by a quantised matrix of this type.
    All codes that a lane multiplies at once must share a scale. An input row must be a multiple of
    LINE_DEPTH elements, which a box copy (TMA) loads at a time.
    """
    return dtype.columns % LINE_DEPTH == 0 and (whole(dtype) or dtype.group % LANE_DEPTH == 0)


def whole(dtype: RowType) -> bool:
    """True if a row has one scale and no zero point. Then the complete sum is multiplied by the
    scale, instead of each element.
    """
    return dtype.groups == 1 and not dtype.zeros


def codes_bytes(dtype: RowType) -> int:
    """Bytes of the codes that a stage holds of one row of the quantised matrix."""
    return dtype.codes.nbytes(STAGE_DEPTH)


def scales_bytes(dtype: RowType) -> int:
    """The size in bytes of the box (TMA box) that loads the scales of a row for one stage,
    and of the box that loads its zero points. 0 if the complete row has one scale and no zero
    point. In memory, boxes begin and end at multiples of BOX_BYTES from the row's start.
    """
    if whole(dtype):
        return 0
    size, group = dtype.scales.itemsize, dtype.group
    step = math.gcd(STAGE_DEPTH, group)  # stages begin at multiples of it within a group
    count = (group - step + STAGE_DEPTH - 1) // group + 1
    apart = STAGE_DEPTH // group * size if STAGE_DEPTH % group == 0 else size
    aligned = math.gcd(BOX_BYTES, apart, dtype.scales_at)
    if dtype.zeros:
        aligned = math.gcd(aligned, dtype.zeros_at)
    return -(-(BOX_BYTES - aligned + count * size) // BOX_BYTES) * BOX_BYTES


def part_fits(k: int, parts: int) -> bool:
    """True if every part of k (split-K) begins at a multiple of STAGE_DEPTH, the elements of k in
    one stage of the ring.
    """
    lines = -(-k // LINE_DEPTH)
    return parts == 1 or -(-lines // parts) % (STAGE_DEPTH // LINE_DEPTH) == 0


def stage_bytes(dtype: RowType, rows: int, columns: int) -> int:
    """Bytes of one stage of the ring. rows: the rows of the input in it. columns: the rows of the
    quantised matrix in it.
    """
    high = -(-rows // 8) * 8
    each = codes_bytes(dtype) + (2 if dtype.zeros else 1) * scales_bytes(dtype)
    return high * STAGE_DEPTH * dtype.values.itemsize + columns * each
