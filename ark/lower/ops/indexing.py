"""Lowering of ops that copy elements to other indices: concat and remaps (pad, flip, slices,
tile).
"""

from __future__ import annotations

from typing import Any

from ark.ir.attributes import AxisAttributes, RemapAttributes
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.lower.copies import copy_box
from ark.lower.merge import part
from ark.lower.tiling import box_coords, box_tile
from ark.tasks.remap import RemapParams
from ark.tasks.turned import turned_tile, turns


def lower_remap(lowering: Lowering, node: Node) -> None:
    out, given = node.outputs[0], node.read(RemapAttributes)
    size = out.dtype.itemsize
    if turns(given.rules, given.fill, node.inputs[0], out) and lowering.machine.cooperative:
        tile = turned_tile(out.shape, size, lowering.machine.processors)
    else:
        tile = box_tile(out.shape, lowering.machine, itemsize=size)
    rules: Any = given.rules  # checked by the kind's schema
    params = RemapParams(rules=rules, fill=given.fill, tile=tuple(tile))
    lowering.emit("remap", params, [*node.inputs, out], box_coords(out.shape, tile))


def lower_concat(lowering: Lowering, node: Node) -> None:
    """Emits a copy of each tensor into its part of the result."""
    axis, at = node.read(AxisAttributes).axis, 0
    for number, source in enumerate(node.inputs):
        target = part(node.outputs[0], axis, at, source.shape[axis])
        copy_box(lowering, source, target, f".{number}")
        at += source.shape[axis]
