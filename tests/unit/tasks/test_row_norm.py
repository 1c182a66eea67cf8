"""How many rows of a norm a warp holds in registers at once, in a block with many registers."""

from __future__ import annotations

import re

import pytest

from ark.backend import registry
from ark.plan import kind as kinds
from ark.plan.kind import OperandType, Signature

MATRIX = registry.machine("h200").using("matrix")


@pytest.mark.parametrize(
    ("rows", "columns", "at_once"), [(191, 96, 4), (48, 192, 4), (12, 384, 2), (16, 768, 2)]
)
def test_a_warp_holds_few_rows_at_once(rows: int, columns: int, at_once: int) -> None:
    matrix = OperandType("bf16", (132 * rows, columns), (columns, 1))
    weight = OperandType("bf16", (columns,), (1,))
    params = {"function": "rmsnorm", "rows": rows, "eps": 1e-6}
    text = kinds.get("row_norm").source(
        "norm", Signature("row_norm", params, (matrix, weight, matrix)), MATRIX
    )
    call = re.search(r"ark_row_norm<([^(]*)>\(", text)
    assert call is not None
    *_, _, _, held, _, _ = call[1].split(", ")
    assert int(held) == at_once
