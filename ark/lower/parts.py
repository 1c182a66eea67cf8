"""The parts of a product and the rmsnorm of their sum: whoever adds up a row norms it, so that the
sum is not read again. A residual may be added too, and the sum is written for others.

Called by the lowering of rmsnorm, whose place is just behind the product's, and of products.
"""

from __future__ import annotations

from ark.ir.dtype import fp32
from ark.ir.graph import Node
from ark.ir.values import dense_view
from ark.lower.context import Lowering
from ark.lower.tiling import split
from ark.plan.groups import Group
from ark.plan.types import MAX_OPERANDS
from ark.tasks import expression
from ark.tasks.combine import CHUNK
from ark.tasks.combine_norm import CombineNormParams
from ark.tasks.pointwise import PointwiseParams

ADDED = ".sum"  # ends the name of the op that adds up parts


def sum_of_parts(count: int) -> list:
    """The expression that adds up the first `count` operands, in order."""
    tree = expression.leaf(0)
    for i in range(1, count):
        tree = ["add", tree, expression.leaf(i)]
    return tree


def is_normed(lowering: Lowering, node: Node) -> bool:
    """Is the next node an rmsnorm of a product's rows, which can be one with the sum of parts?"""
    norm, made = lowering.next, node.outputs[0]
    return (
        norm is not None
        and (norm.type, norm.placement) == ("rmsnorm", node.placement)
        and norm.inputs[0].buffer.id == made.buffer.id
        and made.dtype == fp32
    )


def norm_sum(lowering: Lowering, node: Node) -> bool:
    """Lowers an rmsnorm together with the sum before it; false if that is not what it norms."""
    last = lowering.groups[-1] if lowering.groups else None
    if last is None or not _fits(last, node):
        return False
    *shares, total = last.operands
    (_, weight), normed = node.inputs, node.outputs[0]
    columns = total.shape[-1]
    params = CombineNormParams("fp32", columns, node.attrs["eps"])
    operands = [*(lowering.flat(t) for t in shares), weight, *map(lowering.flat, (total, normed))]
    rows = split(total.elements // columns, lowering.machine.processors)
    lowering.groups.pop()
    lowering.emit("combine_norm", params, operands, [(a * columns, b * columns) for a, b in rows])
    return True


def _fits(last: Group, node: Node) -> bool:
    if (
        not isinstance(last.params, PointwiseParams)
        or not last.name.endswith(ADDED)
        or node.type != "rmsnorm"
    ):
        return False
    *shares, total = last.operands
    source, weight = node.inputs
    plain = sum_of_parts(len(shares))
    beside = ["add", expression.leaf(len(shares) - 1), sum_of_parts(len(shares) - 1)]
    return (
        last.params.expr in (plain, beside)
        and (last.phase, last.processors) == (node.phase, node.processors)
        and last.context == node.context
        and node.hints is None
        and not (last.after or node.after)
        and len(shares) + 3 <= MAX_OPERANDS
        and all(t.dtype == fp32 and t.dense and t.elements == total.elements for t in shares)
        and total.dtype == fp32
        and all(t.dense for t in (total, source, weight, node.outputs[0]))
        and total.elements == source.elements
        and total.buffer.id == source.buffer.id
        and dense_view(total, (total.elements,)) == dense_view(source, (total.elements,))
        and source.shape[-1] == total.shape[-1] == weight.shape[0]
        and total.shape[-1] * fp32.itemsize % CHUNK == 0
    )
