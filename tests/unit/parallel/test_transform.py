"""op_trans, op_assign, op_order: split graphs give the one-device result, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ark
from ark.errors import BaseError, InvalidUsageError, ModelError, UnsupportedError
from ark.lower import registry
from ark.parallel.transform import (
    ParallelGraph,
    annotate,
    materialise,
    whole_of,
)
from tests.cases.transform import (
    inputs_of,
    on_cpu_ranks,
    on_ranks_in_numpy,
    one_device,
    perceptron,
    random_graph,
    random_plan,
    traced,
)

X, Y, Z = (4, 12), (8, 12), (2, 4, 6)
OPS: dict[str, Callable[[], Any]] = {
    "linear": lambda: ark.linear(ark.tensor(X), ark.tensor(Y)),
    "matmul": lambda: ark.matmul(ark.tensor((2, 4, 6)), ark.tensor((6, 8))),
    "transposed": lambda: ark.matmul(ark.tensor((6, 4)), ark.tensor((6, 8)), transpose_input=True),
    "add": lambda: ark.add(ark.tensor(Z), ark.tensor((4, 1))),
    "mul": lambda: ark.mul(ark.tensor(X), 3.0),
    "relu": lambda: ark.relu(ark.tensor(X)),
    "cast": lambda: ark.cast(ark.tensor(X), ark.int32),
    "softmax": lambda: ark.softmax(ark.tensor(Z)),
    "layernorm": lambda: ark.layernorm(ark.tensor(X)),
    "rmsnorm": lambda: ark.rmsnorm(ark.tensor(X), ark.tensor((12,)), 1e-5),
    "reduce_sum": lambda: ark.reduce_sum(ark.tensor(Z), axis=1),
    "reduce_sum row": lambda: ark.reduce_sum(ark.tensor(Z), axis=2, keepdims=False),
    "reduce_max": lambda: ark.reduce_max(ark.tensor(Z), axis=0),
    "transpose": lambda: ark.transpose(ark.tensor(Z), [2, 0, 1]),
}


@pytest.mark.parametrize("name", OPS)
def test_annotations_say_how_ops_split(name: str) -> None:
    """An op's annotation has a letter for each dimension. If the op is cut along a letter that
    permits this, the results of the parts, computed by the op's reference, combine to the whole
    result.
    """
    node = traced(OPS[name]).nodes[0]
    annotation = annotate(node)
    define = registry.get(node.type).reference
    assert define is not None
    random = np.random.default_rng(1)
    arrays = [random.standard_normal(t.shape) for t in node.inputs]
    (whole,) = define(arrays, node.attrs)
    assert whole.shape == node.outputs[0].shape
    letters = {x for operand in annotation.operands for x in operand} - annotation.frozen - {"1"}
    assert letters
    for letter in letters:
        *cuts, joined = [
            operand.index(letter) if letter in operand else None for operand in annotation.operands
        ]
        sides = [
            [a, a] if cut is None else np.split(a, 2, axis=cut)
            for a, cut in zip(arrays, cuts, strict=True)
        ]
        parts = [define([side[i] for side in sides], node.attrs)[0] for i in range(2)]
        assert (joined is None) == (letter in annotation.summed)
        result = parts[0] + parts[1] if joined is None else np.concatenate(parts, axis=joined)
        np.testing.assert_allclose(result, whole, rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_plans_give_the_one_device_result(data: st.DataObject) -> None:
    graph = random_graph(data)
    plan = random_plan(data, graph, data.draw(st.integers(1, 4)))
    inputs = inputs_of(graph, data.draw(st.integers(0, 99)))
    want = one_device(graph, inputs)
    np.testing.assert_array_equal(on_ranks_in_numpy(plan, inputs), want)


def megatron(plan: ParallelGraph) -> None:
    """Splits the first product by columns and the second by rows; every rank computes the rest."""
    up, relu, down, *rest = plan.nodes
    for node, letter in ((up, "y"), (relu, "b"), (down, "z")):
        (piece,) = plan.pieces(node)
        for rank, part in enumerate(plan.op_trans(piece, letter, plan.ranks)):
            plan.op_assign(part, rank)
    for node in rest:
        plan.op_assign(plan.pieces(node)[0], *range(plan.ranks))


def stages(plan: ParallelGraph) -> None:
    """Assigns consecutive nodes to consecutive ranks, as a pipeline."""
    for i, node in enumerate(plan.nodes):
        plan.op_assign(plan.pieces(node)[0], i * plan.ranks // len(plan.nodes))


@pytest.mark.parametrize(
    ("split", "ranks", "kinds"),
    [(megatron, 2, {"all_reduce"}), (stages, 2, {"send", "recv"})],
)
def test_plans_on_cpu_ranks(split: Callable[[ParallelGraph], None], ranks: int, kinds: set) -> None:
    graph = traced(perceptron)
    inputs = inputs_of(graph, 5)
    plan = ParallelGraph(graph, ranks)
    split(plan)
    result = materialise(plan)
    moving = {n.type for g in result.graphs for n in g.nodes} & {"all_reduce", "send", "recv"}
    assert moving == kinds
    parts = on_cpu_ranks(result, inputs, {graph.nodes[-1].outputs[0].buffer.id})
    np.testing.assert_array_equal(whole_of(graph, parts), one_device(graph, inputs))


def test_missing_share_is_detected() -> None:
    """Shows that the comparison of the tests above would notice an error: if one of two partial
    sums is missing, the result differs.
    """
    graph = traced(lambda: ark.linear(ark.tensor((4, 8), name="x"), ark.tensor((4, 8), name="w")))
    plan = ParallelGraph(graph, 2)
    product, copy = plan.nodes
    first, second = plan.op_trans(plan.pieces(product)[0], "z", 2)
    plan.op_assign(first, 0)
    plan.op_assign(second, 0)
    plan.op_assign(plan.pieces(copy)[0], 1)
    inputs = inputs_of(graph, 3)
    want = one_device(graph, inputs)
    np.testing.assert_array_equal(on_ranks_in_numpy(plan, inputs), want)
    plan._pieces[product.id].remove(second)
    with pytest.raises(ModelError, match="add up"):
        materialise(plan)


def test_order_is_kept_or_refused() -> None:
    graph = traced(lambda: ark.add(ark.relu(ark.tensor(X)), ark.exp(ark.tensor(X))))
    plan = ParallelGraph(graph, 2)
    relu, exp, add, copy = (plan.pieces(n)[0] for n in plan.nodes)
    for piece in (relu, exp, add, copy):
        plan.op_assign(piece, 0)
    plan.op_order(exp, relu)
    nodes = materialise(plan).graphs[0].nodes
    assert [n.type for n in nodes] == ["exp", "relu", "add", "copy"]
    assert nodes[1].after == nodes[0].outputs
    plan.op_order(add, exp)
    with pytest.raises(ModelError, match=r"has a cycle.*add"):
        materialise(plan)


def refused(act: Callable[[ParallelGraph], Any], error: type[BaseError], says: str) -> None:
    plan = ParallelGraph(traced(lambda: ark.softmax(ark.tensor(X))), 2)
    with pytest.raises(error, match=says):
        act(plan)


def test_invalid_transformations_are_refused() -> None:
    refused(lambda p: p.op_trans(p.pieces(p.nodes[0])[0], "a", 3), InvalidUsageError, "a divisor")
    refused(lambda p: p.op_trans(p.pieces(p.nodes[0])[0], "b", 2), InvalidUsageError, "at once")
    refused(
        lambda p: p.op_trans(p.pieces(p.nodes[0])[0], "q", 2), InvalidUsageError, "no dimension"
    )
    refused(lambda p: p.op_assign(p.pieces(p.nodes[0])[0], 2), InvalidUsageError, "0 to 1")
    refused(lambda p: p.op_assign(p.pieces(p.nodes[0])[0], 1, 1), InvalidUsageError, "each once")
    refused(materialise, ModelError, "without ranks")

    def twice(p: ParallelGraph) -> None:
        (piece,) = p.pieces(p.nodes[0])
        p.op_trans(piece, "a", 2)
        p.op_trans(piece, "a", 2)

    refused(twice, InvalidUsageError, "not in this plan")


def test_graphs_that_cannot_be_split_are_refused() -> None:
    def in_place() -> Any:
        x = ark.tensor(X)
        return ark.relu(ark.exp(x, output=x), output=x)

    with pytest.raises(UnsupportedError, match="its own memory"):
        ParallelGraph(traced(in_place), 2)

    def two_shapes() -> Any:
        y = ark.tensor(X)
        ark.relu(ark.tensor((2, 12)), output=y[0:2])
        ark.relu(ark.tensor((6, 4)), output=ark.reshape(y, (12, 4))[6:12])
        return y

    with pytest.raises(UnsupportedError, match="has one shape"):
        ParallelGraph(traced(two_shapes), 2)
