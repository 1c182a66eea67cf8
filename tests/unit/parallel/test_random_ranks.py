"""Random graphs, plans and layouts on 2 to 8 CPU ranks give the result of one device, bit
for bit.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import ark
from ark.ir.graph import Graph, Node
from ark.parallel import Layout, ParallelGraph, materialise, table
from ark.parallel.transform import whole_of
from tests.cases.transform import (
    inputs_of,
    on_cpu_ranks,
    on_ranks_in_numpy,
    one_device,
    random_graph,
    random_plan,
    traced,
)
from tests.slow import SLOW

EXAMPLES = 25 if SLOW else 2
FEW = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


def executed(plan: ParallelGraph, graph: Graph, inputs: dict[str, np.ndarray]) -> np.ndarray:
    parts = on_cpu_ranks(materialise(plan), inputs, {graph.nodes[-1].outputs[0].buffer.id})
    return whole_of(plan.graph, parts)


@pytest.mark.timeout(1200)
@FEW
@given(st.data(), st.integers(2, 8))
def test_random_graphs_and_plans(data: st.DataObject, ranks: int) -> None:
    graph = random_graph(data)
    plan = random_plan(data, graph, ranks)
    inputs = inputs_of(graph, data.draw(st.integers(0, 99)))
    np.testing.assert_array_equal(executed(plan, graph, inputs), one_device(graph, inputs))


def product_and_relu() -> Any:
    return ark.relu(ark.linear(ark.tensor((8, 16), name="x"), ark.tensor((8, 16), name="w")))


def lay_out(plan: ParallelGraph, node: Node, layout: Layout) -> None:
    """Splits a node by a layout of its result. Ranks are numbered over (replicas, values,
    *dims).
    """
    (piece,) = plan.pieces(node)
    letters = piece.annotation.operands[-1] if piece.annotation else ()
    summed = sorted(piece.annotation.summed)[0] if piece.annotation and layout.values > 1 else ""
    pieces = plan.op_trans(piece, summed, layout.values) if layout.values > 1 else [piece]
    for letter, parts in zip(letters, layout.dims, strict=True):
        pieces = [result for piece in pieces for result in plan.op_trans(piece, letter, parts)]
    for number, piece in enumerate(pieces):
        ranks = [r * len(pieces) + number for r in range(layout.replicas)]
        plan.op_assign(piece, *ranks)


def laid_out(before: Layout, after: Layout) -> tuple[ParallelGraph, Graph]:
    graph = traced(product_and_relu)
    plan = ParallelGraph(graph, before.devices)
    product, relu, copy = plan.nodes
    lay_out(plan, product, before)
    for node in (relu, copy):
        lay_out(plan, node, after)
    return plan, graph


def all_layouts(devices: int) -> list[Layout]:
    return [x for x in table((8, 8), devices).layouts if max(x.dims) <= 8]


@pytest.mark.timeout(1200)
@FEW
@given(st.data(), st.sampled_from([2, 4, 8]))
def test_random_layouts(data: st.DataObject, devices: int) -> None:
    """A product in one layout (partial sums, replicas or parts) is converted to another layout,
    which a relu reads.
    """
    actual = all_layouts(devices)
    before = data.draw(st.sampled_from(actual))
    after = data.draw(st.sampled_from([x for x in actual if x.values == 1]))
    plan, graph = laid_out(before, after)
    inputs = inputs_of(graph, 7)
    np.testing.assert_array_equal(executed(plan, graph, inputs), one_device(graph, inputs))


def test_every_pair_of_layouts_of_four_ranks() -> None:
    """All 60 conversions between layouts of four ranks give the same result as one device. The
    ranks' graphs are executed in NumPy.
    """
    actual = all_layouts(4)
    pairs = list(itertools.product(actual, (x for x in actual if x.values == 1)))
    assert len(pairs) == 60
    for before, after in pairs:
        plan, graph = laid_out(before, after)
        inputs = inputs_of(graph, 7)
        got = on_ranks_in_numpy(plan, inputs)
        np.testing.assert_array_equal(got, one_device(graph, inputs))
