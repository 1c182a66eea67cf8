"""Lowering of gathers and scatters. If an index selects a whole row, tasks move rows; otherwise
they move single elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ark.ir.attributes import AxisAttributes, ScatterAttributes
from ark.ir.fold import tile_of
from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.lower.context import Lowering
from ark.lower.copies import copy_box
from ark.lower.merge import part
from ark.lower.ops.movement import move, whole_view
from ark.lower.tiling import MAX_COORDINATE, box_coords, box_tile
from ark.machine import Machine
from ark.tasks.along import lines
from ark.tasks.remap import GatherParams
from ark.tasks.scatter import MAX_LANE_ELEMENTS_IN_FLIGHT, ScatterParams, same_places

ROWS_PER_PROCESSOR = 4  # with at least these rows per processor, each row gets a warp
MIN_UPDATES_PER_SPAN = 8  # a task's part of the table (span) gets at least this many updates


def lower_gather(lowering: Lowering, node: Node) -> None:
    source, ids = node.inputs
    out, axis = node.outputs[0], node.read(AxisAttributes).axis
    outer, inner = math.prod(source.shape[:axis]), math.prod(source.shape[axis + 1 :])
    many = ids.elements
    table = whole_view(lowering, source, (outer, source.shape[axis], inner), fill=True)
    index = whole_view(lowering, ids, (many,), fill=True)
    target = whole_view(lowering, out, (outer, many, inner), fill=False)
    for first, column in itertools.product(
        range(0, outer, MAX_COORDINATE), range(0, inner, MAX_COORDINATE)
    ):
        operands = [table, index, target]
        if max(outer, inner) > MAX_COORDINATE:
            for i in (0, 2):
                rows = part(operands[i], 0, first, min(outer - first, MAX_COORDINATE))
                operands[i] = part(rows, 2, column, min(inner - column, MAX_COORDINATE))
        _emit_gather(lowering, operands, 1, False)
    if target.buffer.id != out.buffer.id:
        move(lowering, lowering.view(target, out.shape), out)


def _emit_gather(
    lowering: Lowering, operands: Sequence[IrTensor], axis: int, elements: bool
) -> None:
    shape = operands[2].shape
    itemsize, line = operands[2].dtype.itemsize, lowering.machine.line_bytes
    weight = 1
    if shape[-1] == 1 and lowering.machine.coalesces:
        weight = max(1, line // itemsize)  # a whole line is loaded for each element
    tile = box_tile(shape, lowering.machine, weight, itemsize)
    params = GatherParams(axis=axis, elements=elements, tile=tuple(tile))
    lowering.emit("gather", params, operands, box_coords(shape, tile))


def lower_gather_elements(lowering: Lowering, node: Node) -> None:
    _emit_gather(lowering, [*node.inputs, *node.outputs], node.read(AxisAttributes).axis, True)


def lower_scatter(lowering: Lowering, node: Node) -> None:
    """Emits a scatter, in two steps. Tasks first copy the input to the output, unless both are the
    same memory. Then tasks apply the updates to the part of the output that the indices can select.
    If there are many rows, there is only one step: each task copies and updates whole rows.
    """
    source, ids, updates = node.inputs
    out, given = node.outputs[0], node.read(ScatterAttributes)
    axis = given.axis
    if _by_rows(lowering, node):
        frame = lines(out.shape, axis)
        tile = box_tile(frame, lowering.machine, max(updates.shape[axis], out.shape[axis]))
        params = ScatterParams(
            axis=axis, function=given.function, tile=tuple(tile), span=out.shape[axis]
        )
        coords = [(*coord, 0) for coord in box_coords(frame, tile)]
        operands = [ids, updates, source, out]
        lowering.emit("scatter", params, operands, coords)
        return
    if source.buffer.id != out.buffer.id:
        copy_box(lowering, source, out, ".copy")
    for d, n in enumerate(updates.shape):
        if d != axis:
            out = part(out, d, 0, n)
    frame = lines(updates.shape, axis)
    count, size, spans = updates.shape[axis], out.shape[axis], 1
    tile, alone = (
        box_tile(frame, lowering.machine, count),
        not lowering.machine.cooperative,
    )
    if not alone and 2 * len(box_coords(frame, tile)) <= lowering.machine.processors:
        tile[3] = min(tile[3], lowering.machine.lanes)  # each thread's updates are in one row
    if same_places(ids.shape, axis) and not alone:
        tile = _warp_tile(frame, lowering.machine) or box_tile(frame, lowering.machine)
        tasks = len(box_coords(frame, tile))
        spans = max(1, min(lowering.machine.processors // tasks, count // MIN_UPDATES_PER_SPAN))
    span = -(-size // spans)
    params = ScatterParams(axis=axis, function=given.function, tile=tuple(tile), span=span)
    places = range(0, size, span)
    coords = [(*coord, place) for place in places for coord in box_coords(frame, tile)]
    lowering.emit("scatter", params, [ids, updates, out], coords)


def _warp_tile(frame: Sequence[int], machine: Machine) -> list[int] | None:
    """A tile with as many elements as one warp can load at the same time. With such tiles, the
    warps of a block apply different updates concurrently. None if there would be more tiles than
    processors.
    """
    most = MAX_LANE_ELEMENTS_IN_FLIGHT * machine.lanes
    tile = tile_of(frame, most)
    fits = math.prod(tile) <= most and len(box_coords(frame, tile)) <= machine.processors
    return tile if fits else None


def _by_rows(lowering: Lowering, node: Node) -> bool:
    """True if there are so many rows that a scatter is emitted in one step, in which each task
    copies and updates whole rows.
    """
    source, ids, updates = node.inputs
    out, axis, machine = node.outputs[0], node.read(ScatterAttributes).axis, lowering.machine
    rows = math.prod(lines(out.shape, axis))
    enough = not machine.cooperative or rows >= ROWS_PER_PROCESSOR * machine.processors
    return (
        enough
        and source.buffer.id != out.buffer.id
        and axis == len(out.shape) - 1
        and lines(updates.shape, axis) == lines(out.shape, axis)
        and not same_places(ids.shape, axis)
        and source.strides[-1] == out.strides[-1] == 1
    )
