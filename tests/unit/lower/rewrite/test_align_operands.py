"""Copies of operands to rows that begin at multiples of 16 bytes, for products of fp32 in tiles."""

from __future__ import annotations

import pytest

import ark
from ark.backend.registry import machine
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan

pytest.importorskip("ark_cuda")


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "copies"),
    [(1000, 333, 777, 2), (1000, 333, 776, 1), (1000, 336, 776, 0), (250, 333, 333, 0)],
)
def test_odd_rows_of_fp32_are_copied_if_the_product_is_large(
    rows: int, depth: int, columns: int, copies: int
) -> None:
    model = Model()
    with use_model(model):
        ark.matmul(ark.tensor([rows, depth]), ark.tensor([depth, columns]))
    planned = plan(model.graph, machine("h100"))
    assert [op.kind for op in planned.ops] == ["elementwise"] * copies + ["matmul"]
    product = planned.ops[-1]
    steps = [planned.tensors[t].strides[0] for t in product.operands[:2]]
    assert copies == 0 or all(step % 4 == 0 for step in steps)
