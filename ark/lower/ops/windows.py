"""Lowering of convolutions whose tasks read windows directly from the image. (Other convolutions
are matrix products with a matrix of windows.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from ark.ir.attributes import ConvolutionAttributes, GroupedAttributes
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.lower.depthwise_tiles import depthwise_tile
from ark.lower.grouped_tiles import grouped_tile
from ark.lower.tiling import MAX_TILE_ELEMENTS, box_coords, box_tile
from ark.tasks.channels_last import GroupedParams
from ark.tasks.convolution import ConvolutionParams
from ark.tasks.depthwise import DepthwiseParams

MIN_TASK_MULTIPLICATIONS = 1 << 13  # fewest multiplications of a task


WARP_READ_ELEMENTS = 32  # neighbouring positions of a tile that the lanes of a warp read at once


def lower_convolution(lowering: Lowering, node: Node) -> None:
    """Emits the tasks of a convolution, each of which computes a tile of one image. A tile has as
    many positions of the image as possible, then as many outputs, then as many groups, as long as
    there are tiles for all processors.
    """
    weight, source, *others = node.inputs
    out, machine = node.outputs[0], lowering.machine
    images, groups, rows, places = out.shape
    work = out.elements * weight.shape[3]
    tasks = max(1, min(machine.processors, work // MIN_TASK_MULTIPLICATIONS))
    share = min(-(-out.elements // tasks), MAX_TILE_ELEMENTS)
    given = node.read(ConvolutionAttributes)
    sizes = given.sizes
    # If a group has one output, tiles consist of whole rows of the image.
    line = sizes[1] if rows == 1 and len(sizes) == 2 else WARP_READ_ELEMENTS
    wide = places if share >= places else min(places, -(-share // line) * line)
    down = min(rows, max(1, share // wide))

    def rounds(several: int) -> tuple[int, int]:
        """The cost of computing `several` groups per task, as a pair of numbers to minimise. The
        first is the number of groups that the busiest processor computes. The second decides
        between equal values: it is negative because more groups per task are better.
        """
        return -(-images * -(-groups // several) // tasks) * several, -several

    whole_images = down == rows and wide == places
    most = max(1, min(groups, MAX_TILE_ELEMENTS // (rows * places)))
    several = min(range(1, most + 1), key=rounds) if whole_images else 1
    tile = [1, several, -(-rows // -(-rows // down)), wide]
    params = ConvolutionParams(**_params(node, tile))
    operands = [weight, source, out, *others]
    lowering.emit("convolution", params, operands, box_coords(out.shape, tile))


def lower_depthwise(lowering: Lowering, node: Node) -> None:
    """Emits a depthwise convolution of an image with channels last as tiles of the result."""
    given, out, machine = node.read(ConvolutionAttributes), node.outputs[0], lowering.machine
    chosen = depthwise_tile(given, out.shape, out.dtype.itemsize, machine)
    tile, patch = chosen or (box_tile(out.shape, machine, math.prod(given.size)), None)
    _emit_last(lowering, node, DepthwiseParams(**_params(node, tile), patch=patch))


def lower_grouped(lowering: Lowering, node: Node) -> None:
    """Emits a convolution in groups of an image with channels last as tiles of the result."""
    machine, out = lowering.machine, node.outputs[0]
    if machine.coalesces:
        tile = grouped_tile(node, machine)
    else:
        tile = box_tile(out.shape, machine, node.inputs[0].shape[0])
    _emit_last(lowering, node, GroupedParams(**_params(node, tile)))


def _params(node: Node, tile: Sequence[int]) -> dict[str, Any]:
    """The parameters of a convolution's tasks with these tiles of the result."""
    given = node.read(GroupedAttributes)
    kept = structs.replace(given, finish=None).to_node()
    return {**kept, "tile": tuple(tile), "expr": given.finish}


def _emit_last(lowering: Lowering, node: Node, params: ConvolutionParams) -> None:
    """Emits a convolution of an image with channels last. The task kind has the name of the node's
    type.
    """
    weight, source, *others = node.inputs
    out = node.outputs[0]
    coords = box_coords(out.shape, params.tile)
    lowering.emit(node.type, params, [weight, source, out, *others], coords)
