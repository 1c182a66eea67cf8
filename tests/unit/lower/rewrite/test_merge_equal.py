"""An elementwise op that computes what an earlier one has computed is not computed again."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.frontend.tensor import Tensor
from ark.ir.dtype import fp32
from ark.ir.graph import Graph
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.merge_equal import merge_equal
from ark.lower.rewrite.views import in_shape
from tests.unit.lower.computed import computed

H200 = registry.machine("h200")
ROWS = np.random.default_rng(2).standard_normal((4, 8)).astype(np.float32)


class Program:
    """A graph with two results that are computed from one input. The second is the input times
    `scale`. written: a copy into the input comes before the second. viewed: the product reads the
    two results in another shape.
    """

    def __init__(self, scale: float = 2.0, written: bool = False, viewed: bool = False) -> None:
        model = ark.Model()
        with ark.use_model(model):
            self.x, other = ark.tensor([4, 8], fp32), ark.tensor([4, 8], fp32)
            first = ark.mul(self.x, 2.0)
            if written:
                ark.copy(other, self.x)
            second = ark.mul(self.x, scale)
            if viewed:
                first, second = (ark.reshape(t, [8, 4]) for t in (first, second))
            self.middle = first, second
            self.result: Tensor = ark.matmul(first, ark.transpose(second, [1, 0]))
        self.graph = model.graph

    def values(self, graph: Graph) -> np.ndarray:
        inputs = {self.x.ir.buffer.id: ROWS.copy()}
        return computed(graph, inputs, self.result.ir)


@pytest.mark.parametrize("viewed", [False, True])
def test_equal_op_is_computed_once(viewed: bool) -> None:
    program = Program(viewed=viewed)
    merged = merge_equal(program.graph, Context(H200))
    assert [n.type for n in merged.nodes].count("mul") == 1
    assert np.array_equal(program.values(merged), program.values(program.graph))


@pytest.mark.parametrize("program", [Program(scale=3.0), Program(written=True)])
def test_other_numbers_and_overwritten_inputs_are_computed(program: Program) -> None:
    assert merge_equal(program.graph, Context(H200)) is program.graph


def test_result_that_the_caller_reads_is_computed() -> None:
    program = Program()
    kept = frozenset({program.middle[1].ir.buffer.id})
    assert merge_equal(program.graph, Context(H200, kept=kept)) is program.graph


def test_readers_of_a_merged_result_keep_the_shapes_in_which_they_read_it() -> None:
    """Two ops may read a tensor in different shapes. The shape belongs to the reading op, and the
    tensor has the same id in both.
    """
    with ark.use_model(ark.Model()) as model:
        x = ark.tensor([4, 8], fp32)
        first, second = ark.mul(x, 2.0), ark.mul(x, 2.0)
        ark.matmul(first, ark.transpose(second, [1, 0]))
        total = ark.reduce_sum(ark.reshape(second, [32]), 0)
    flat = in_shape(second.ir, (32,))
    assert flat is not None and flat.id == second.ir.id
    nodes = [
        dataclasses.replace(n, inputs=(flat,)) if n.outputs[0].id == total.ir.id else n
        for n in model.graph.nodes
    ]
    merged = merge_equal(model.graph.with_nodes(nodes), Context(H200))
    shapes = {n.type: n.inputs[0].shape for n in merged.nodes}
    assert len(merged.nodes) == len(nodes) - 1
    assert shapes["reduce_sum"] == (32,) and shapes["transpose"] == (4, 8)
