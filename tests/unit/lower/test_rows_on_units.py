"""Linear layers of few rows on machines whose matrix units read the input from memory. They are
fused like layers of one row, whatever the size of shared memory; layers of more rows are not.
"""

from __future__ import annotations

import pytest

from ark.backend import registry
from ark.ir.dtype import DataType, bf16, fp16, fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.plan.types import Plan
from ark.plan.verify import verify

WIDTH, HIDDEN = 512, 4096
TURNED = {"transpose_a": False, "transpose_b": True}


def gated(machine: str, rows: int, dtype: DataType) -> Plan:
    """Returns a plan of y = x + down(swiglu(up(rmsnorm(x))))."""
    graph = Graph()
    x = graph.tensor((rows, WIDTH), fp32, arena="state", name="x")
    factors = graph.tensor((WIDTH,), fp32, arena="parameter", name="norm")
    first = graph.tensor((2 * HIDDEN, WIDTH), dtype, arena="parameter", name="first")
    second = graph.tensor((WIDTH, HIDDEN), dtype, arena="parameter", name="second")
    shapes = ((rows, WIDTH), (rows, 2 * HIDDEN), (rows, HIDDEN), (rows, WIDTH))
    normed, sums, gate, down = (graph.tensor(shape, fp32) for shape in shapes)
    y = graph.tensor((rows, WIDTH), fp32, arena="state", name="y")
    graph.add("rmsnorm", [x, factors], [normed], {"eps": 1e-5}, "norm")
    graph.add("matmul", [normed, first], [sums], TURNED, "up")
    graph.add("swiglu_pairs", [sums], [gate], {}, "gate")
    graph.add("matmul", [gate, second], [down], TURNED, "down")
    graph.add("add", [down, x], [y], {}, "add")
    result = plan(graph, registry.machine(machine))
    verify([result])
    return result


def joined(result: Plan) -> bool:
    """True if the plan has only two ops, linear layers into which all others are fused."""
    kinds = [(op.kind, op.params.get("prologue"), op.params.get("epilogue")) for op in result.ops]
    return kinds == [("linear", "rmsnorm", "swiglu"), ("linear", "none", "add")]


@pytest.mark.parametrize("machine", ["mi250x", "mi300x", "mi355x"])
@pytest.mark.parametrize("rows", [2, 8, 16])
def test_few_rows_are_joined(machine: str, rows: int) -> None:
    assert joined(gated(machine, rows, bf16))


@pytest.mark.parametrize(
    ("machine", "rows", "dtype"),
    [("mi300x", 17, bf16), ("mi300x", 8, fp16), ("rx7900xtx", 8, bf16)],
)
def test_other_products_are_not_joined(machine: str, rows: int, dtype: DataType) -> None:
    assert not joined(gated(machine, rows, dtype))
