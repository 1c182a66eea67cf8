"""Tests how many rows of a norm a warp holds in registers at once, if each thread of its block may
use many registers.
"""

from __future__ import annotations

import re

import pytest

from ark.backend import registry
from ark.machine import Machine
from ark.plan import kind as kinds
from ark.plan.kind import OperandType, Signature

MATRIX = registry.machine("h200").using("matrix")


def _at_once(function: str, rows: int, columns: int, machine: Machine) -> int:
    """The number of rows that a thread holds at once in a task with this many rows."""
    matrix = OperandType("bf16", (132 * rows, columns), (columns, 1))
    weights = (OperandType("bf16", (columns,), (1,)),) if function == "rmsnorm" else ()
    params = {"function": function, "rows": rows, "eps": 1e-6}
    text = kinds.get("row_norm").source(
        "norm", Signature("row_norm", params, (matrix, *weights, matrix)), machine
    )
    call = re.search(r"ark_row_norm<([^(]*)>\(", text)
    assert call is not None
    *_, _, _, held, _, _ = call[1].split(", ")
    return int(held)


@pytest.mark.parametrize(
    ("rows", "columns", "at_once"), [(191, 96, 4), (48, 192, 4), (12, 384, 2), (16, 768, 2)]
)
def test_warp_holds_few_rows_at_once(rows: int, columns: int, at_once: int) -> None:
    assert _at_once("rmsnorm", rows, columns, MATRIX) == at_once


@pytest.mark.parametrize(("rows", "at_once"), [(128, 2), (64, 1), (3, 1), (4096, 16)])
def test_few_short_rows_are_divided_among_all_warps(rows: int, at_once: int) -> None:
    assert _at_once("log_softmax", rows, 10, registry.machine("h200")) == at_once
