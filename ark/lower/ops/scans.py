"""Lowering of cumulative sums and products, and of linear recurrences."""

from __future__ import annotations

import math

from ark.ir.attributes import ScanAttributes
from ark.ir.fold import fold
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.lower.tiling import box_coords, box_tile
from ark.tasks.along import lines
from ark.tasks.scan import ScanParams


def lower_scan(lowering: Lowering, node: Node) -> None:
    out, given = node.outputs[0], node.read(ScanAttributes)
    axis = given.axis
    frame = lines(out.shape, axis)
    machine = lowering.machine
    tile = box_tile(frame, machine, out.shape[axis])
    tasks = math.prod(-(-n // t) for n, t in zip(fold(frame), tile, strict=True))
    if tasks < machine.processors and machine.cooperative:
        tile[3] = min(tile[3], machine.lanes)  # neighbours that one block processes side by side
    lowering.emit(
        "scan",
        ScanParams(
            axis=axis,
            function=given.function,
            exclusive=given.exclusive,
            reverse=given.reverse,
            tile=tuple(tile),
        ),
        [*node.inputs, out],
        box_coords(frame, tile),
    )
