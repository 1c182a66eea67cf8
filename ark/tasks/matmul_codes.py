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
BOX_BYTES = 16  # a box's rows are a multiple of this many bytes


def row_type(operand: OperandType) -> RowType | None:
    """The type of a quantised matrix; None for any other operand."""
    dtype = by_name(operand.dtype)
    return dtype if isinstance(dtype, RowType) else None


def served(dtype: RowType) -> bool:
    """True if a lane's codes share a scale, and rows of the input begin at whole lines."""
    return dtype.columns % LINE_DEPTH == 0 and (whole(dtype) or dtype.group % LANE_DEPTH == 0)


def whole(dtype: RowType) -> bool:
    """True if a row has one scale and no zero point: sums are scaled once they are complete."""
    return dtype.groups == 1 and not dtype.zeros


def codes_bytes(dtype: RowType) -> int:
    """Bytes of the codes of a row in a stage."""
    return dtype.codes.nbytes(STAGE_DEPTH)


def scales_bytes(dtype: RowType) -> int:
    """Bytes of the scales of a row in a stage, or of its zero points; 0 if a stage has none."""
    if whole(dtype):
        return 0
    step = math.gcd(LINE_DEPTH, dtype.group)  # stages begin at multiples of it within a group
    count = (dtype.group - step + STAGE_DEPTH - 1) // dtype.group + 1
    return -(-dtype.scales.nbytes(count) // BOX_BYTES) * BOX_BYTES


def stage_bytes(dtype: RowType, rows: int, columns: int) -> int:
    """Bytes of a stage, of this many rows of the input and rows of the quantised matrix."""
    high = -(-rows // 8) * 8
    each = codes_bytes(dtype) + (2 if dtype.zeros else 1) * scales_bytes(dtype)
    return high * STAGE_DEPTH * dtype.values.itemsize + columns * each
