"""Lowering of pools (the maximum, mean or sum of each window of an image), and of the gradient of
the maximum.
"""

from __future__ import annotations

import math

from msgspec import structs

from ark.ir.attributes import PoolAttributes
from ark.ir.graph import Node
from ark.ir.pool_attributes import UnpoolAttributes
from ark.lower.context import Lowering
from ark.lower.tiling import box_coords, box_tile
from ark.tasks.pool import PoolParams
from ark.tasks.unpool import BLOCK_DIMENSIONS, UnpoolParams


def lower_pool(lowering: Lowering, node: Node) -> None:
    out = node.outputs[0]
    given = node.read(PoolAttributes)
    tile = box_tile(out.shape, lowering.machine, math.prod(given.size))
    kept = {key: value for key, value in structs.asdict(given).items() if key != "sizes"}
    coords = box_coords(out.shape, tile)
    lowering.emit("pool", PoolParams(**kept, tile=tuple(tile)), [*node.inputs, out], coords)


def lower_unpool(lowering: Lowering, node: Node) -> None:
    """Emits the gradient of a max pool as tiles of the image."""
    out, given = node.outputs[0], node.read(UnpoolAttributes)
    tile = box_tile(out.shape, lowering.machine, math.prod(given.size))
    if len(given.size) == BLOCK_DIMENSIONS + 1:  # whole blocks of pixels that read the same windows
        steps = zip(tile[1:3], given.stride[:BLOCK_DIMENSIONS], out.shape[2:4], strict=True)
        tile[1:3] = (min(-(-n // step) * step, most) for n, step, most in steps)
    kept = {k: v for k, v in structs.asdict(given).items() if k not in ("sizes", "image")}
    params = UnpoolParams(**kept, tile=tuple(tile))
    lowering.emit("unpool", params, [*node.inputs, out], box_coords(out.shape, tile))
