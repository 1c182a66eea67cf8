"""Lowering of elementwise ops. Each task computes the node's expression on a tile of the result."""

from __future__ import annotations

from ark.ir.fold import MAX_FOLDED_DIMS, fold
from ark.ir.graph import Node
from ark.ir.values import MAX_DIM_ELEMENTS
from ark.lower.context import Lowering
from ark.lower.merge import merge
from ark.lower.tiling import box_coords, box_tile, swept
from ark.tasks import expression
from ark.tasks.elementwise import ElementwiseParams
from ark.tasks.node_expressions import expression_of


def lower_elementwise(lowering: Lowering, node: Node) -> None:
    """Emits tiles of an elementwise op's output. If no operand is broadcast or strided, all
    operands are viewed in one dimension.
    """
    inputs = list(dict.fromkeys(node.inputs))  # an operand that is given twice is read once
    expr = expression.substitute(
        expression_of(node), [expression.leaf(inputs.index(t)) for t in node.inputs]
    )
    tensors = [*inputs, *node.outputs]
    plain = node.hints is None or not node.hints.cuts
    same = all(t.dense and t.shape == node.outputs[0].shape for t in tensors)
    if not plain or expression.places(expr):
        pass
    elif (
        same
        and not any(t.dtype.packed for t in tensors)
        and tensors[0].elements <= MAX_DIM_ELEMENTS
    ):
        tensors = [lowering.flat(t) for t in tensors]
    elif len(node.outputs[0].shape) > MAX_FOLDED_DIMS:
        tensors = merge(tensors)
    out = tensors[-1]
    asked, itemsize = lowering.tile(fold(out.shape)), max(t.dtype.itemsize for t in tensors)
    tile = asked or box_tile(out.shape, lowering.machine, itemsize=itemsize, share=lowering.share)
    if out.dtype.packed:
        tile[3] = min(out.shape[-1], tile[3] + tile[3] % out.dtype.per_item)
    coords = box_coords(out.shape, tile)
    coords = coords if asked else swept(coords, lowering.machine)
    lowering.emit("elementwise", ElementwiseParams(expr, tuple(tile)), tensors, coords)
