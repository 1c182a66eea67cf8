"""Caches of codes: a position of a head is a row of a RowType (ark.ir.dtype) of int8 or fp8_e4m3
with one scale, which is the row's largest magnitude over the largest code. What appends to caches
and what reads them checks such operands here; cache_rows.h has the device side.
"""

from __future__ import annotations

from ark.ir.dtype import RowType, by_name
from ark.plan.kind import OperandType, Signature
from ark.plan.params import FLOAT_NAMES, need
from ark.tasks import text
from ark.tasks.row_values import HEADER as ROWS_HEADER

LARGEST_CODES = {"int8": 127.0, "fp8_e4m3": 448.0}
"""By the types of codes that caches have."""
LEAST_MAGNITUDE = 1e-30
"""What the largest magnitude of a row counts as at least."""


def cache_row(dtype: str) -> RowType | None:
    """The type of a cache's rows; None for one of floats."""
    row = by_name(dtype)
    return row if isinstance(row, RowType) else None


def cache_operand(sig: Signature, index: int) -> OperandType:
    """The operand; PlanError unless its type is one of floats, or of rows that caches have."""
    operand = sig.operands[index]
    row = cache_row(operand.dtype)
    known = row is not None and row.codes.name in LARGEST_CODES and not row.zeros
    need(
        operand.dtype in FLOAT_NAMES or (known and row is not None and row.groups == 1),
        f"operand {index} is {operand.dtype}, expected floats, or rows of "
        f"{' or '.join(LARGEST_CODES)} with one scale",
    )
    width = operand.shape[-1] if operand.shape else 0
    need(row is None or width == row.columns, f"rows of {operand.dtype} are not {width} wide")
    return operand


def element_bytes(operand: OperandType) -> float:
    """Bytes of an element of a cache, with its share of the scale."""
    return operand.itemsize / operand.per_item


def cache_texts(sig: Signature, index: int) -> tuple[str, ...]:
    """Device code of a cache that is this operand, behind that of its kind."""
    if cache_row(sig.operands[index].dtype) is None:
        return ()
    return (ROWS_HEADER, text.header("cache_rows.h"))


def appender(sig: Signature, index: int, body: str) -> str:
    """The body that appends to the cache, of these two: floats element by element, codes by
    rows.
    """
    return body if cache_row(sig.operands[index].dtype) is None else f"{body}_rows"
