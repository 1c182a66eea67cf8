"""Gradients that have at most one nonzero element in each line along an axis. An example is the
gradient of the logits from which a cross entropy looks up one per row. They are computed by
comparing indices, so that no tensor of zeros is written before a scatter.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.frontend.tensor import Tensor
from ark.ir.graph import Node
from ark.lower.rewrite.fuse_chains import expression_of
from ark.ops.elementwise import add
from ark.ops.gradients.products import wide
from ark.ops.logic import equal, less
from ark.ops.reductions import reduce_sum
from ark.ops.selection import iota, where

PLACED = ["where", ["input", 0], ["input", 1], ["number", 0.0]]
"""The expression of a node that places an element: the element where the index is its own, else
0.
"""


def placed(shape: Sequence[int], ids: Tensor, given: Tensor, axis: int) -> Tensor | None:
    """A tensor of `shape` that has the elements `given` at the indices `ids` along an axis, and
    zeros elsewhere. Negative indices count from the end. None unless `ids` has exactly one element
    for each line along the axis.
    """
    along = [n if d == axis else 1 for d, n in enumerate(shape)]
    if ids.ir.shape != tuple(1 if d == axis else n for d, n in enumerate(shape)):
        return None
    from_begin = where(less(ids, 0), add(ids, shape[axis]), ids)
    return where(equal(iota(along, axis, ids.ir.dtype), from_begin), wide(given), 0.0)


def row_sums(given: Tensor) -> Tensor:
    """The sum of each row of a gradient, (..., 1). Where `placed` has put one element into each
    row, that element is the sum.
    """
    writers = {node.outputs[0].id: node for node in given.model.graph.nodes if node.outputs}
    node = writers.get(given.ir.id)
    if node is not None and _places_in_rows(node, writers):
        return Tensor(node.inputs[1], given.model)
    return reduce_sum(given, -1)


def _places_in_rows(node: Node, writers: dict[int, Node]) -> bool:
    """True for a node of `placed` along the last axis."""
    if node.type != "where" or expression_of(node) != PLACED:
        return False
    compared = writers.get(node.inputs[0].id)
    if compared is None or compared.type != "equal" or len(compared.inputs) != 2:
        return False
    line, (_, ids) = writers.get(compared.inputs[0].id), compared.inputs
    column = (*node.outputs[0].shape[:-1], 1)
    return (
        line is not None
        and line.type == "iota"
        and expression_of(line) == ["index", -1]
        and ids.shape == node.inputs[1].shape == column
    )
