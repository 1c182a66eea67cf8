"""If a later gather reads only some rows of a result, the other rows are not computed; the gathered
rows stay the same.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from ark_cpu import machines

from ark.ir.dtype import bf16, fp32, int32
from ark.ir.graph import Graph
from ark.ir.values import Tensor
from ark.lower.registry import get
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.hoist_gathers import hoist_gathers
from ark.machine import Machine
from ark.models.build import Shape
from ark.models.config import builtin_config
from ark.models.plans import make_plans
from tests.projection import with_matrix
from tests.slow import examples

MATRIX = with_matrix(machines.model(2)).using("matrix")
ROWS, WIDE = 6, 8
KINDS = ("product", "product", "product", "norm", "add", "bias", "gate", "own", "across")


def values(graph: Graph, given: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Returns the final contents of all buffers, by each op's reference."""
    memory = {buffer: array.copy() for buffer, array in given.items()}
    for node in graph.nodes:
        inputs = [memory[t.buffer.id].reshape(t.shape) for t in node.inputs]
        reference = get(node.type).reference
        assert reference is not None
        for out, result in zip(node.outputs, reference(inputs, node.attrs), strict=True):
            assert result.shape == out.shape, node
            memory[out.buffer.id] = result
    return memory


class Draw:
    """A random graph of ops that work by rows and of other ops, with gathers of some results."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.graph = Graph()
        self.rng = np.random.default_rng(seed)
        self.given: dict[int, np.ndarray] = {}
        self.pool = [self.state((ROWS, WIDE)) for _ in range(2)]
        self.asked: list[Tensor] = []
        for _ in range(self.random.randint(3, 12)):
            self.pool.append(self.step())
        for _ in range(self.random.randint(1, 2)):
            self.gather()

    def state(self, shape: tuple[int, ...]) -> Tensor:
        tensor = self.graph.tensor(shape, fp32, arena="state")
        self.given[tensor.buffer.id] = self.rng.standard_normal(shape) / 3
        return tensor

    def one(self) -> Tensor:
        return self.random.choice(self.pool[-4:])

    def add(
        self, type: str, inputs: list[Tensor], shape: tuple[int, ...], **attrs: object
    ) -> Tensor:
        out = self.graph.tensor(shape, fp32)
        if self.random.random() < 0.1 and shape == inputs[0].shape:
            out = self.graph.rewrite(inputs[0])
        elif self.random.random() < 0.1:
            out = self.graph.tensor(shape, fp32, arena="state")
        self.graph.add(type, inputs, [out], attrs, type)
        return out

    def step(self) -> Tensor:
        x, rows = self.one(), (ROWS, WIDE)
        plain = {"transpose_a": False, "transpose_b": True}
        kind = self.random.choice(KINDS)
        if kind == "product":
            return self.add("matmul", [x, self.state((WIDE, WIDE))], rows, **plain)
        if kind == "norm":
            return self.add("rmsnorm", [x, self.state((WIDE,))], rows, eps=1e-5)
        if kind == "add":
            return self.add("add", [x, self.one()], rows)
        if kind == "bias":
            other = self.random.choice([(WIDE,), (1, WIDE), (ROWS, 1)])
            return self.add("mul", [x, self.state(other)], rows)
        if kind == "gate":
            wide = self.add("matmul", [x, self.state((2 * WIDE, WIDE))], (ROWS, 2 * WIDE), **plain)
            return self.add("swiglu_pairs", [wide], rows)
        if kind == "own":  # the right operand of this product also has rows
            scores = self.add("matmul", [x, self.one()], (ROWS, ROWS), **plain)
            return self.add("matmul", [scores, self.state((WIDE, ROWS))], rows, **plain)
        turned = {"transpose_a": True, "transpose_b": True}
        return self.add(
            "matmul", [self.state((ROWS, ROWS)), x], rows, **turned | {"transpose_b": False}
        )

    def gather(self) -> None:
        count = self.random.randint(1, 4)
        ids = self.graph.tensor((count,), int32, arena="state")
        self.given[ids.buffer.id] = self.rng.integers(0, ROWS, count)
        out = self.graph.tensor((count, WIDE), fp32)
        self.graph.add("gather", [self.one(), ids], [out], {"axis": 0}, "rows")
        self.asked.append(out)


@pytest.mark.parametrize("seed", range(examples(400)))
def test_random_graphs_give_the_same(seed: int) -> None:
    draw = Draw(seed)
    before = values(draw.graph, draw.given)
    hoisted = hoist_gathers(draw.graph, Context(MATRIX))
    after = values(hoisted, draw.given)
    asked = [t for t in draw.graph.tensors if t.buffer.arena == "state"] + draw.asked
    for tensor in asked:
        np.testing.assert_allclose(
            after[tensor.buffer.id], before[tensor.buffer.id], rtol=1e-9, atol=1e-9
        )


def test_many_random_graphs_compute_fewer_rows() -> None:
    """Of the 80 random graphs of the test above, the pass changes at least 20, so that test can
    fail.
    """
    moved = 0
    for seed in range(80):
        draw = Draw(seed)
        hoisted = hoist_gathers(draw.graph, Context(MATRIX))
        moved += any(n.type == "matmul" and n.outputs[0].shape[0] < ROWS for n in hoisted.nodes)
    assert moved >= 20


def chained() -> tuple[Graph, Tensor, Tensor]:
    """Returns a graph of two products, one after the other, and a gather of one row of the second
    result.
    """
    graph = Graph()
    x, first, second = (
        graph.tensor(s, fp32, arena="state") for s in ((ROWS, WIDE), (WIDE, WIDE), (WIDE, WIDE))
    )
    products = [graph.tensor((ROWS, WIDE), fp32) for _ in range(2)]
    attrs = {"transpose_a": False, "transpose_b": True}
    graph.add("matmul", [x, first], [products[0]], attrs, "first")
    graph.add("matmul", [products[0], second], [products[1]], attrs, "second")
    ids = graph.tensor((1,), int32, arena="state")
    graph.add("gather", [products[1], ids], [graph.tensor((1, WIDE), fp32)], {"axis": 0}, "row")
    return graph, products[0], ids


def shapes(graph: Graph, kept: frozenset[int] = frozenset(), machine: Machine = MATRIX) -> list:
    nodes = hoist_gathers(graph, Context(machine, kept=kept)).nodes
    return [(n.type, n.outputs[0].shape[0]) for n in nodes]


def test_chain_without_other_readers_is_computed_for_its_row() -> None:
    graph, between, _ = chained()
    assert shapes(graph) == [("gather", 1), ("matmul", 1), ("matmul", 1)]
    only_second = [("matmul", ROWS), ("gather", 1), ("matmul", 1)]
    assert shapes(graph, frozenset({between.buffer.id})) == only_second
    graph.add("relu", [between], [graph.tensor((ROWS, WIDE), fp32)], {}, "reader")
    assert shapes(graph)[:3] == only_second
    whole = [(n.type, n.outputs[0].shape[0]) for n in graph.nodes]
    assert shapes(graph, machine=machines.model(2)) == whole


def test_gathers_are_not_moved_past_writes() -> None:
    graph, _, _ = chained()
    x = graph.nodes[0].inputs[0]
    graph.add("neg", [x], [graph.rewrite(x)], {}, "written")
    graph.nodes.insert(2, graph.nodes.pop())
    assert shapes(graph) == [(n.type, n.outputs[0].shape[0]) for n in graph.nodes]


def test_first_token_of_a_prompt_takes_one_row_behind_the_last_attention() -> None:
    config = dataclasses.replace(builtin_config("llama-3.2-1b"), num_hidden_layers=2)
    machine = with_matrix(machines.model(2))
    (plan,) = make_plans(Shape(config, bf16, 300, 128), machine, {"variant": "matrix"})
    begin = [op for op in plan.ops if op.name.startswith("begin.")]
    rows = {op.name: plan.tensors[op.operands[0]].shape[0] for op in begin if op.kind == "matmul"}
    last = ("layers.1.attention.output", "layers.1.mlp.gate+up", "layers.1.mlp.down", "head.logits")
    assert {name for name, n in rows.items() if n == 1} == {f"begin.{name}" for name in last}
    assert set(rows.values()) == {1, 128}
    # The residual is gathered before the output of attention is.
    taken = [op.name for op in begin if op.kind == "gather"]
    names = ("add.rows", "attention.output.rows")
    assert taken == [f"begin.layers.1.{name}" for name in names]
