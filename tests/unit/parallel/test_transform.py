"""op_trans, op_assign, op_order: split graphs give the one-device result, or are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ark
from ark.backend import registry as backends
from ark.errors import BaseError, InvalidUsageError, ModelError, UnsupportedError
from ark.frontend.model import Model, use_model
from ark.ir.graph import Graph
from ark.lower import registry
from ark.lower.pipeline import plan as make_plan
from ark.parallel.transform import (
    ParallelGraph,
    RankGraphs,
    View,
    annotate,
    materialise,
    part_of,
    whole_of,
)
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.interpreter import Interpreter
from tests.ranks import ThreadRanks, run_ranks
from tests.unit.parallel.ranks_in_numpy import Ranks


def traced(build: Callable[[], Any]) -> Graph:
    """The one-device graph that `build` makes; its last tensor is copied to "result"."""
    model = Model(0, 1)
    with use_model(model):
        made = build()
        target = ark.tensor(made.shape(), made.dtype(), name="result")
        ark.copy(made, output=target)
    return model.graph


def inputs_of(graph: Graph, seed: int) -> dict[str, np.ndarray]:
    """Random contents of what the graph reads and nobody writes, by buffer name."""
    random = np.random.default_rng(seed)
    written = {n.outputs[0].buffer.id for n in graph.nodes}
    found = {}
    for tensor in (t for n in graph.nodes for t in n.inputs):
        if tensor.buffer.id not in written and tensor.buffer.name not in found:
            found[tensor.buffer.name] = random.integers(-3, 4, tensor.extents).astype(np.float32)
    return found


def one_device(graph: Graph, inputs: dict[str, np.ndarray]) -> np.ndarray:
    memory = Interpreter()
    for tensor in graph.tensors:
        if tensor.buffer.name in inputs and tensor.shape == tensor.extents:
            memory.view(tensor)[...] = inputs[tensor.buffer.name]
    memory.run(graph, 0)
    return memory.view(graph.nodes[-1].outputs[0]).copy()


def on_ranks_in_numpy(plan: ParallelGraph, inputs: dict[str, np.ndarray]) -> np.ndarray:
    made = materialise(plan)
    ranks = Ranks(made.graphs)
    written = plan.graph.nodes[-1].outputs[0].buffer
    for rank, held in enumerate(made.held):
        for name, view in held.items():
            if name in inputs:
                ranks.fill(rank, name, part_of(inputs[name], view))
    ranks.run()
    parts = [
        (view, ranks.read(rank, name))
        for rank, held in enumerate(made.held)
        for name, view in held.items()
        if view.buffer == written.id
    ]
    return whole_of(plan.graph, parts)


def on_cpu_ranks(
    made: RankGraphs, inputs: dict[str, np.ndarray], results: set[int]
) -> list[tuple[View, np.ndarray]]:
    """Plans and verifies the ranks' graphs and runs them twice at once; parts of the results."""
    plans = [make_plan(g, backends.machine("cpu-1")) for g in made.graphs]
    verify(plans)
    backend, _ = backends.choose("cpu")

    def work(own: ThreadRanks) -> list[tuple[View, np.ndarray]]:
        held = made.held[own.rank]
        with Executor(
            plans[own.rank], backend, backend.open(0), ranks=own, budget_s=20.0
        ) as executor:
            for name, view in held.items():
                if name in inputs:
                    executor.write(name, part_of(inputs[name], view))
            executor.start(2).wait(60.0)
            found = [
                (v, executor.read(n).reshape(v.shape))
                for n, v in held.items()
                if v.buffer in results
            ]
            own.barrier()
            return found

    return list(itertools.chain(*run_ranks(len(plans), work)))


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
    """Along every letter that may be cut, parts by the op's reference make up the whole."""
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
        made = parts[0] + parts[1] if joined is None else np.concatenate(parts, axis=joined)
        np.testing.assert_allclose(made, whole, rtol=1e-9, atol=1e-9)


def random_graph(data: st.DataObject) -> Graph:
    def build() -> Any:
        values = [ark.tensor((8, 12)), ark.tensor((12, 8)), ark.tensor((8, 12))]
        for _ in range(data.draw(st.integers(1, 4))):
            a = data.draw(st.sampled_from(values))
            same = [v for v in values if v.shape() == a.shape()]
            wide = [v for v in values if v.shape()[-1] == a.shape()[-1]]
            choices = [
                lambda a=a: ark.relu(a),
                lambda a=a: ark.transpose(a, [1, 0]),
                lambda a=a, s=same: ark.add(a, data.draw(st.sampled_from(s))),
                lambda a=a, t=wide: ark.linear(a, data.draw(st.sampled_from(t))),
                lambda a=a: ark.sub(a, ark.reduce_sum(a, axis=1)),
                lambda a=a: ark.mul(a[:, 0:4], 2.0),
            ]
            values.append(data.draw(st.sampled_from(choices))())
        return values[-1]

    return traced(build)


def random_plan(data: st.DataObject, graph: Graph, ranks: int) -> ParallelGraph:
    plan = ParallelGraph(graph, ranks)
    for node in plan.nodes:
        for _ in range(data.draw(st.integers(0, 2))):
            piece = data.draw(st.sampled_from(plan.pieces(node)))
            assert piece.annotation is not None
            operands = zip(piece.annotation.operands, (*piece.inputs, piece.output), strict=True)
            sizes = {x: n for names, v in operands for x, n in zip(names, v.shape, strict=True)}
            letter = data.draw(st.sampled_from(sorted(sizes)))
            if letter == "1" or letter in piece.annotation.frozen:
                continue
            parts = [n for n in (2, 3, 4) if sizes[letter] % n == 0]
            if parts:
                plan.op_trans(piece, letter, data.draw(st.sampled_from(parts)))
        for piece in plan.pieces(node):
            chosen = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks))
            plan.op_assign(piece, *chosen)
    return plan


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_plans_give_the_one_device_result(data: st.DataObject) -> None:
    graph = random_graph(data)
    plan = random_plan(data, graph, data.draw(st.integers(1, 4)))
    inputs = inputs_of(graph, data.draw(st.integers(0, 99)))
    want = one_device(graph, inputs)
    np.testing.assert_array_equal(on_ranks_in_numpy(plan, inputs), want)


def perceptron() -> Any:
    """h + down(relu(up(h))), with a bias."""
    x, up = ark.tensor((6, 16), name="x"), ark.parameter((24, 16), name="up")
    down, bias = ark.parameter((16, 24), name="down"), ark.tensor((16,), name="bias")
    hidden = ark.relu(ark.linear(x, up))
    return ark.add(ark.add(ark.linear(hidden, down), bias), x)


def megatron(plan: ParallelGraph) -> None:
    """The first product by columns, the second by rows, the rest on every rank."""
    up, relu, down, *rest = plan.nodes
    for node, letter in ((up, "y"), (relu, "b"), (down, "z")):
        (piece,) = plan.pieces(node)
        for rank, part in enumerate(plan.op_trans(piece, letter, plan.ranks)):
            plan.op_assign(part, rank)
    for node in rest:
        plan.op_assign(plan.pieces(node)[0], *range(plan.ranks))


def stages(plan: ParallelGraph) -> None:
    """A pipeline: node after node from rank to rank."""
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
    made = materialise(plan)
    moving = {n.type for g in made.graphs for n in g.nodes} & {"all_reduce", "send", "recv"}
    assert moving == kinds
    parts = on_cpu_ranks(made, inputs, {graph.nodes[-1].outputs[0].buffer.id})
    np.testing.assert_array_equal(whole_of(graph, parts), one_device(graph, inputs))


def test_a_missing_share_is_seen() -> None:
    """The comparison can fail: with one share of two the sum is another."""
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
    with pytest.raises(ModelError, match="adds up"):
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


def test_what_cannot_be_split_is_refused() -> None:
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
