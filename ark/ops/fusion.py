"""The op that a region of elementwise ops becomes (ark.lower.rewrite.fuse_regions).

Users do not write it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.ir.attributes import FusionAttributes
from ark.ir.fold import FOLDED
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.lower.registry import register
from ark.lower.tiling import box_coords, box_tile, swept
from ark.tasks import expression
from ark.tasks.fusion import STAGES, FusionParams


def _lower(lowering: Lowering, node: Node) -> None:
    """Tiles over the outputs' shape."""
    shape = node.outputs[0].shape
    given = node.read(FusionAttributes)
    work = len(given.last) + given.count * len(given.each)
    tile = box_tile(shape, lowering.machine, max(2, work))
    params = FusionParams(inputs=len(node.inputs), tile=tuple(tile), **node.attrs)
    coords = swept(box_coords(shape, tile), lowering.machine)
    lowering.emit("fusion", params, [*node.inputs, *node.outputs], coords)


def _reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    values, given = list(inputs), FusionAttributes.from_node(attrs)
    for stage in STAGES:
        for tree in getattr(given, stage):
            made = expression.evaluate(tree, values)
            along = given.axis - FOLDED + made.ndim
            values.append(made.sum(along, keepdims=True) if stage == "sums" else made)
    return [values[number] for number in given.stores]


register("fusion", _reference, _lower)
