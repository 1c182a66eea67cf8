"""Lowering of `fusion` nodes: elementwise ops, with sums between them, that are computed in one
task.
"""

from __future__ import annotations

from ark.ir.attributes import FusionAttributes
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.lower.tiling import box_coords, box_tile, swept
from ark.tasks.fusion import FusionParams


def lower_fusion(lowering: Lowering, node: Node) -> None:
    """Emits the tasks of a `fusion` node, each of which computes a tile of the node's outputs."""
    shape = node.outputs[0].shape
    given = node.read(FusionAttributes)
    work = len(given.last) + given.count * len(given.each)
    tile = box_tile(shape, lowering.machine, max(2, work))
    params = FusionParams(inputs=len(node.inputs), tile=tuple(tile), **node.attrs)
    coords = swept(box_coords(shape, tile), lowering.machine)
    lowering.emit("fusion", params, [*node.inputs, *node.outputs], coords)
