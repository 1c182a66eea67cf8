"""Properties of products whose right operand is a quantised matrix (a RowType), and which matrix
units multiply without its values in memory. Used by lowering and by the backends' device functions.
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
    """True if all codes that a lane multiplies at once share a scale, and input rows consist of
    whole rows of a box copy (LINE_DEPTH elements).
    """
    return dtype.columns % LINE_DEPTH == 0 and (whole(dtype) or dtype.group % LANE_DEPTH == 0)


def whole(dtype: RowType) -> bool:
    """True if a row has one scale and no zero point: sums are scaled once they are complete."""
    return dtype.groups == 1 and not dtype.zeros


def codes_bytes(dtype: RowType) -> int:
    """Bytes of the codes that a stage holds of one row of the quantised matrix."""
    return dtype.codes.nbytes(STAGE_DEPTH)


def scales_bytes(dtype: RowType) -> int:
    """Bytes of the box of a stage that has a row's scales, or of the one that has its zero points.
    They are 0 if a stage has none. Boxes begin and end at multiples of BOX_BYTES in a row.
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
    """True if all parts of k begin at multiples of a stage's depth."""
    lines = -(-k // LINE_DEPTH)
    return parts == 1 or -(-lines // parts) % (STAGE_DEPTH // LINE_DEPTH) == 0


def stage_bytes(dtype: RowType, rows: int, columns: int) -> int:
    """Bytes of a stage, of this many rows of the input and rows of the quantised matrix."""
    high = -(-rows // 8) * 8
    each = codes_bytes(dtype) + (2 if dtype.zeros else 1) * scales_bytes(dtype)
    return high * STAGE_DEPTH * dtype.values.itemsize + columns * each
