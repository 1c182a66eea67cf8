"""Lowering of `fusion` nodes: elementwise ops, with sums between them, that are computed in one
task.
"""

from __future__ import annotations

from ark.ir.attributes import FusionAttributes
from ark.ir.graph import Node
from ark.ir.values import MAX_DIM_ELEMENTS
from ark.lower.context import Lowering
from ark.lower.tiling import box_coords, box_tile, swept
from ark.tasks.fusion import FusionParams


def lower_fusion(lowering: Lowering, node: Node) -> None:
    """Emits the tasks of a `fusion` node, each of which computes a tile of the node's outputs. If
    there are no sums and no operand is strided, all operands are viewed in one dimension.
    """
    given, tensors = node.read(FusionAttributes), [*node.inputs, *node.outputs]
    shape, machine = node.outputs[0].shape, lowering.machine
    same = all(t.dense and (t.shape == shape or t.elements == 1) for t in tensors)
    if given.axis < 0 and same and node.outputs[0].elements <= MAX_DIM_ELEMENTS:
        tensors = [lowering.flat(t) for t in tensors]
        shape = tensors[-1].shape
    work = max(2, len(given.last) + given.count * len(given.each))
    many = tensors[-1].elements > machine.costs.little_elements
    tile = box_tile(shape, machine, 1 if given.axis < 0 and many else work)
    params = FusionParams(inputs=len(node.inputs), tile=tuple(tile), **node.attrs)
    coords = swept(box_coords(shape, tile), machine)
    lowering.emit("fusion", params, tensors, coords)
