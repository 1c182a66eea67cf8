"""Lowering of appends to caches whose rows are in pages, and of attention over such caches."""

from __future__ import annotations

from dataclasses import replace

from ark.ir.attributes import AttentionAttributes
from ark.ir.dtype import fp32
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.lower.ops.attention import (
    MIN_TILED_QUERIES,
    are_older,
    attention_splits,
    lower_attention_tiles,
    merge_group,
    streamed_rows,
)
from ark.lower.tiling import divided_bytes
from ark.machine.variant import LOAD
from ark.plan.params import Params
from ark.plan.types import MAX_STAGE_PAGES, pages_of_stage
from ark.tasks.attention import AttentionMergeParams, SplitAttentionParams


def lower_paged_append(lowering: Lowering, node: Node) -> None:
    rows, table, position, _ = node.inputs
    cache = node.outputs[0]
    coords = [(head,) for head in range(cache.shape[1])]
    lowering.emit("paged_append", Params(), [rows, table, position, cache], coords)


def lower_paged_attention(lowering: Lowering, node: Node) -> None:
    """Emits attention over caches in pages. For a few rows, the positions of each row are divided
    into parts, with one task for each part, so that most processors have one. For many rows, if the
    mask is not that of an ordinary decoder, or if the query heads of a key/value head need more
    shared memory than there is, each task computes a tile of queries.
    """
    sequences = node.inputs[3].shape[0]
    rows = node.inputs[0].shape[0] // sequences
    wide = divided_bytes(node) > lowering.machine.task_bytes
    if wide or not node.read(AttentionAttributes).plain or rows >= MIN_TILED_QUERIES:
        for b in range(sequences):
            q, row, at, out = (
                lowering.part(t, sequences, b)
                for t in (node.inputs[0], *node.inputs[3:5], node.outputs[0])
            )
            inputs = (q, *node.inputs[1:3], at, row, *node.inputs[5:])
            attrs = {**node.attrs, "paged": True}
            lower_attention_tiles(
                lowering, replace(node, inputs=inputs, outputs=(out,), attrs=attrs)
            )
        return
    _lower_splits(lowering, node)


def _lower_splits(lowering: Lowering, node: Node) -> None:
    q, key, value, table, position, *newest = node.inputs
    machine, sequences = lowering.machine, table.shape[0]
    given = node.read(AttentionAttributes)
    heads, width = given.heads, given.head_dim
    kv_heads, page = key.shape[1:3]
    context, streamed = page * table.shape[1], 0
    loads = machine.ring_bytes > 0 or machine.variant.role(LOAD) > 0
    if newest and loads and are_older(lowering, node, (key, value, table), position):
        streamed = streamed_rows(key, heads // kv_heads, machine)
        if pages_of_stage(streamed, page) > MAX_STAGE_PAGES:
            streamed = 0
    # A task reads a part of the positions. If keys and values are streamed through the ring in
    # shared memory, a part has at least the positions of one stage of the ring, or of two stages if
    # there are several sequences.
    least = 64 if not streamed else streamed * (1 if sequences == 1 else 2)
    splits = attention_splits(q.shape[0], kv_heads, context, machine.processors, least)
    if splits == 2 and sequences > 1 and context <= streamed * machine.variant.stages:
        splits = 1  # as for attention over contiguous rows
    # The number of parts into which the positions are divided is limited, because the task that
    # merges a head holds the results of all parts in shared memory.
    room = machine.task_bytes // (4 * (width + 2))
    splits = max(1, min(splits, room))
    params = SplitAttentionParams(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        splits=splits,
        scale=given.scale,
        streamed=streamed,
    )
    merges = []
    for b in range(sequences):
        own, row, at, out = (
            lowering.part(t, sequences, b) for t in (q, table, position, node.outputs[0])
        )
        rows = own.shape[0]
        coords = [(r, h, s) for s in range(splits) for r in range(rows) for h in range(kv_heads)]
        target = out
        if splits > 1:
            target = lowering.temp((rows, heads, splits, width + 2), fp32, f"{node.name}.partial")
            merges.append((target, out))
        fresh = [lowering.part(t, sequences, b) for t in newest]
        operands = [own, key, value, row, at, target, *fresh]
        lowering.emit("paged_attention", params, operands, coords)
    for partial, out in merges:
        group = merge_group(q.shape[0] * heads, heads, 4 * splits * (width + 2), machine)
        merge = AttentionMergeParams(heads, width, splits, group)
        coords2 = [(r, h) for r in range(out.shape[0]) for h in range(0, heads, group)]
        lowering.emit("attention_merge", merge, [partial, out], coords2, ".merge")
