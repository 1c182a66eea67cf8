"""Gradients that have at most one nonzero element in each line along an axis. An example is the
gradient of the logits from which a cross entropy looks up one per row. They are computed by
comparing indices, so that no tensor of zeros is written before a scatter.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.frontend.tensor import Tensor
from ark.ir.dtype import fp32, int32
from ark.ops.elementwise import add, cast
from ark.ops.gradients.elementwise import computed
from ark.ops.gradients.products import wide
from ark.ops.logic import less
from ark.ops.reductions import reduce_sum
from ark.ops.selection import where
from ark.tasks.expression import Tree, leaf, number


def placed(shape: Sequence[int], ids: Tensor, given: Tensor, axis: int) -> Tensor | None:
    """A tensor of `shape` that has the elements `given` at the indices `ids` along an axis, and
    zeros elsewhere. Negative indices count from the end. None unless `ids` has exactly one element
    for each line along the axis.
    """
    if ids.ir.shape != tuple(1 if d == axis else n for d, n in enumerate(shape)):
        return None
    from_begin = where(less(ids, 0), add(ids, shape[axis]), ids)
    from_begin = from_begin if ids.ir.dtype == int32 else cast(from_begin, int32)
    return computed(_placing(axis - len(shape)), [from_begin, wide(given)], shape, fp32)


def _placing(axis: int) -> Tree:
    """The expression of a node that places an element along an axis: the node's first input is the
    element's index, its second input the element. The result is the element at this index, else 0.
    axis: negative, counted from the last axis.
    """
    return ["where", ["equal", ["index", axis], leaf(0)], leaf(1), number(0.0)]


def row_sums(given: Tensor) -> Tensor:
    """The sum of each row of a gradient, (..., 1). Where `placed` has put one element into each
    row, that element is the sum.
    """
    writers = reversed(given.model.graph.nodes)
    node = next((n for n in writers if given.ir.id in [t.id for t in n.outputs]), None)
    column = (*given.ir.shape[:-1], 1)
    places = node is not None and node.elementwise.expr == _placing(-1)
    if node is not None and places and all(t.shape == column for t in node.inputs):
        return Tensor(node.inputs[1], given.model)
    return reduce_sum(given, -1)
