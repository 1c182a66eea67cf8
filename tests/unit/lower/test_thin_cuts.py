"""The tiles of products with few rows or columns: small if the product runs alone, large if many
such products run concurrently and wait for each other.
"""

from __future__ import annotations

import dataclasses

import pytest

from ark.backend import registry
from ark.cli.measure.cases import lstm
from ark.cli.measure.ops import planned
from ark.ir.dtype import DataType, bf16, fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.machine import Machine
from ark.plan.cost import predict
from ark.plan.types import Plan

H200 = registry.get("cuda").machine("h200")


def tasks(task_plan: Plan, op: int) -> int:
    return sum(task.op == op for listed in task_plan.phases[0].processors for task in listed)


def products(count: int, machine: Machine, m: int, n: int, k: int, dtype: DataType) -> Plan:
    """Returns a plan of `count` independent products of (m, k) and (n, k)."""
    graph = Graph()
    for i in range(count):
        a = graph.tensor((m, k), dtype, arena="state", name=f"a{i}")
        b = graph.tensor((n, k), dtype, arena="state", name=f"b{i}")
        c = graph.tensor((m, n), dtype, arena="state", name=f"c{i}")
        graph.add("matmul", [a, b], [c], {"transpose_a": False, "transpose_b": True})
    return plan(graph, machine)


# The expected number of tasks of a product that runs alone, by (rows, columns, k, type).
ALONE = {
    (4096, 1, 4096, fp32): 128,
    (1, 4096, 4096, bf16): 128,
    (1, 128256, 2048, bf16): 132,
    (8, 4096, 4096, fp32): 128,
    (16, 4096, 4096, fp32): 128,
    (1, 1024, 256, bf16): 32,
}


@pytest.mark.parametrize("shape", ALONE)
def test_single_thin_product_is_cut_for_all_processors(
    shape: tuple[int, int, int, DataType],
) -> None:
    m, n, k, dtype = shape
    assert tasks(products(1, H200, m, n, k, dtype), 0) == ALONE[shape]


def test_independent_thin_products_share_the_processors() -> None:
    task_plan = products(20, H200, 1, 1024, 256, bf16)
    counts = {tasks(task_plan, op.id) for op in task_plan.ops}
    assert counts == {6}, counts


def test_products_of_an_lstm_are_few_tasks_each() -> None:
    """Products of an LSTM whose 10 layers run concurrently have at most 8 tasks each. On an H200, 8
    tasks of 128 columns per product took 660 us; 32 tasks of four tiles of 8 columns took 1,800 us
    (docs/history/performance.md).
    """
    task_plan, _ = planned(lstm(10, 20, 256), H200)
    matmuls = [op for op in task_plan.ops if op.kind == "matmul"]
    assert len(matmuls) == 10 * (2 * 20 - 1)
    assert max(tasks(task_plan, op.id) for op in matmuls) <= 8
    assert all("tasks" not in op.params for op in matmuls)  # no tasks of several tiles in sequence


def test_cost_of_a_hand_over_bounds_the_tasks() -> None:
    """A product gets fewer tasks on a machine on which a signal from one processor to another takes
    longer.
    """
    slow = dataclasses.replace(H200.costs, each_signal_us=1.0)
    counts = [
        tasks(products(1, dataclasses.replace(H200, costs=c), 1, 1024, 256, bf16), 0)
        for c in (H200.costs, slow)
    ]
    assert counts[1] < counts[0]


def test_few_rows_of_fp32_beside_warpgroups_are_cut_for_all_processors() -> None:
    """A classifier of 16 images in fp32, in the variant `matrix`, is cut into 125 tasks of 16 x 8.
    In 32 tasks of 16 x 32 it took 178 us on an H200.
    """
    plan = products(1, H200.using("matrix"), 16, 1000, 2048, fp32)
    assert plan.ops[0].params["tile"] == [16, 8]
    assert tasks(plan, 0) == 125
    us = max(span.end for span in predict(plan, 0))
    assert 8 < us < 11  # at few_rate, not at the rate of fp32 tiles, which only `block` has
