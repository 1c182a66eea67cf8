"""Scatters that update what an elementwise op has computed for them alone."""

from __future__ import annotations

from collections.abc import Callable

import ark
from ark.backend import registry
from ark.ir.dtype import fp32, int32
from ark.ir.graph import Node
from ark.lower.prepare import prepare

Added = Callable[[ark.Tensor, ark.Tensor], ark.Tensor]


def scatter_of(added: Added) -> Node:
    """The scatter of a program after all passes. added: gets a tensor of zeros and the result of a
    scatter that adds rows to it.
    """
    with ark.use_model(ark.Model(0, 1)) as model:
        zeros = ark.zeros([256, 64], fp32)
        ids, rows = ark.tensor([4, 1], int32), ark.tensor([4, 64], fp32)
        added(zeros, ark.scatter_elements(zeros, ids, rows, 0, "add"))
    prepared = prepare(model.graph, registry.machine("h200")).graph
    (scatter,) = (n for n in prepared.nodes if n.type == "scatter_elements")
    return scatter


def in_place(node: Node) -> bool:
    return node.inputs[0].buffer.id == node.outputs[0].buffer.id


def test_zeros_that_only_a_scatter_reads_are_updated() -> None:
    assert in_place(scatter_of(lambda zeros, result: ark.exp(result)))


def test_zeros_that_are_read_again_are_copied() -> None:
    assert not in_place(
        scatter_of(lambda zeros, result: ark.matmul(zeros, result, transpose_other=True))
    )
