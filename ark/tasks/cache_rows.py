"""Helpers for quantised caches of keys and values. A row (one position of one head) is stored as
codes (CACHE_CODES) with one scale, which is the row's largest magnitude divided by the largest
code; its type is a RowType (ark.ir.dtype). Task kinds that append to caches or read them check
their operands here; cache_rows.h has the device code.
"""

from __future__ import annotations

from ark.ir.dtype import CACHE_CODES, RowType, by_name
from ark.plan.kind import OperandType, Signature
from ark.plan.params import FLOAT_NAMES, need
from ark.tasks import text
from ark.tasks.row_values import HEADER as ROWS_HEADER

LARGEST_CODES = {t.name: t.largest for t in CACHE_CODES}
"""The largest code of a quantised cache, by the name of the codes' type."""
LEAST_MAGNITUDE = 1e-30
"""A lower bound of the largest magnitude of a row, which avoids a scale of 0."""


def cache_row(dtype: str) -> RowType | None:
    """The row type of a quantised cache; None for a cache of floats."""
    row = by_name(dtype)
    return row if isinstance(row, RowType) else None


def cache_operand(sig: Signature, index: int) -> OperandType:
    """The operand number `index`, which is a cache. Raises PlanError unless its type is floating
    point or a row type that caches may have.
    """
    operand = sig.operands[index]
    row = cache_row(operand.dtype)
    known = row is not None and row.codes.name in LARGEST_CODES and not row.zeros
    need(
        operand.dtype in FLOAT_NAMES or (known and row is not None and row.groups == 1),
        f"operand {index} is {operand.dtype}, expected floats, or rows of "
        f"{' or '.join(LARGEST_CODES)} with one scale",
    )
    width = operand.shape[-1] if operand.shape else 0
    need(
        row is None or width == row.columns,
        f"head_dim is {width}, but rows of {operand.dtype} have {operand.per_item} elements",
    )
    return operand


def element_bytes(operand: OperandType) -> float:
    """Bytes per element of a cache, including the element's share of its row's scale."""
    return operand.itemsize / operand.per_item


def cache_texts(sig: Signature, index: int) -> tuple[str, ...]:
    """The texts of the headers that are needed if operand `index` is a quantised cache; empty for a
    cache of floats.
    """
    if cache_row(sig.operands[index].dtype) is None:
        return ()
    return (ROWS_HEADER, text.header("cache_rows.h"))


def appender(sig: Signature, index: int, body: str) -> str:
    """The name of the device function that appends to the cache, which is operand `index`: `body`
    for a cache of floats, `body`_rows for a quantised cache.
    """
    return body if cache_row(sig.operands[index].dtype) is None else f"{body}_rows"
