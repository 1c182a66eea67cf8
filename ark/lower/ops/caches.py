"""Lowering of appends to caches of keys and values, and of views of their contents."""

from __future__ import annotations

import dataclasses
import math

from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.lower.copies import copy_box
from ark.lower.ops.movement import whole_view
from ark.plan.params import Params


def lower_kv_append(lowering: Lowering, node: Node) -> None:
    rows, position, _ = node.inputs
    batch, cache = position.shape[0], node.outputs[0]
    coords = [(head,) for head in range(cache.shape[0] // batch)]
    for b in range(batch):
        operands = [lowering.part(t, batch, b) for t in (rows, position, cache)]
        lowering.emit("kv_append", Params(), operands, coords)


def lower_kv_cache_slot(lowering: Lowering, node: Node) -> None:
    """Emits an append to one slot (sequence) of a cache. The cache is treated as that of a single
    head whose width is the size of a slot.
    """
    token, position, _ = node.inputs
    cache, slot = node.outputs
    width = math.prod(token.shape)
    rows = (1, cache.shape[0], width)
    one_head = dataclasses.replace(
        cache,
        shape=rows,
        padded=rows,
        extents=(1, cache.extents[0], width),
        offsets=(0, cache.offsets[0], 0),
    )
    row = whole_view(lowering, token, (1, width), fill=True)
    lowering.emit("kv_append", Params(), [row, position, one_head], [(0,)])
    copy_box(lowering, token, slot, ".written")
