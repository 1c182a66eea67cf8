"""Lowering of attention. For a single query row over a KV cache, the positions of the cache are
divided into parts (splits), with one task for each part. For all other attention, the query rows
are divided into tiles, with one task for each tile. Called through ark.lower.registry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from msgspec import structs

from ark.ir import values as ir
from ark.ir.attributes import AttentionAttributes
from ark.ir.dtype import fp32
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.lower.cuts import box_tiles
from ark.lower.tiling import attends_in_units, divided_bytes
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.variant import COMMUNICATE
from ark.tasks.attention import AttentionMergeParams, AttentionParams, staged_warps
from ark.tasks.attention_tiles import AttentionTilesParams, balanced_group

STREAMED, MOST_STREAMED = 8, 64  # positions per step of matrix units, and most per warp


MAX_GROUP_HEADS = 8  # query heads per key/value head that matrix units take at once


# Keys and values are streamed if shared memory has room for this number of warps' partial results.
MIN_STAGED_WARPS = 4


MIN_TILED_QUERIES = 8  # fewest queries for which a task takes tiles of queries


def lower_attention_tiles(lowering: Lowering, node: Node) -> None:
    """Emits attention whose tasks are tiles of query rows. A processor has one task for all its
    tiles if the kernel variant loads ahead of the computation, or if matrix units compute attention
    in every kernel variant. With the attribute `paged`, keys and values are in pages; the input
    after the position has the page numbers.
    """
    q, key, value, *rest = node.inputs
    out, machine = node.outputs[0], lowering.machine
    given = node.read(AttentionAttributes)
    width, length, paged = given.head_dim, q.shape[-2], given.paged
    context = key.shape[-2] * (rest[1].shape[-1] if paged else 1)
    heads, batch = given.heads, q.shape[0] if len(q.shape) == 3 else 1
    boxed = machine.variant.name == "matrix" and machine.has(Capability.WGMMA) and not paged
    units = machine.has(Capability.ATTENTION_UNITS)
    units = units and attends_in_units(node, machine.has(Capability.ATTENTION_PARTS))
    few = 32 if width <= 128 else 16
    rows = box_tiles(machine).attention_rows if boxed else machine.attention_rows if units else few
    while not boxed and rows > 32 and batch * heads * -(-length // rows) < machine.processors:
        rows //= 2
    rows = min(rows, length)
    kv_heads = key.shape[-1] // width if given.by_rows else key.shape[-3]
    params = AttentionTilesParams(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        rows=rows,
        scale=given.scale,
        causal=given.causal,
        window=given.window,
        softcap=given.softcap,
        placed=given.placed,
        sinks=given.sinks,
        by_rows=given.by_rows,
        paged=paged,
        mask=given.mask,
        fill=given.fill,
        strict=given.strict,
        logarithms=given.logarithms,
    )
    tiles = batch * heads * -(-length // rows)
    each = 2 * key.dtype.nbytes(context * width) * kv_heads / heads
    # The number of heads whose tiles are computed at the same time. The keys of these heads must
    # fit in the cache. The number should be large, because with many tiles of different lengths the
    # processors get about equal work.
    enough = -(-2 * machine.processors * rows // length)
    most = max(1, min(batch * heads, max(enough, int(machine.costs.read_bytes / each))))
    if (machine.variant.name == "matrix" or units) and lowering.graph.world_size == 1:
        tasks = min(tiles, machine.processors)
        blocks = -(-length // rows)
        window = -(-given.window // rows) + 1 if given.window else blocks
        seen = min(blocks, window) if given.causal else 1
        group = balanced_group(batch * heads, blocks, tasks, seen, most)
        params = structs.replace(params, tasks=tasks, group=group)
        coords: list[tuple[int, ...]] = [(t,) for t in range(tasks)]
    else:
        params = structs.replace(params, group=most)
        starts = range(0, length, rows)
        coords = [(b, h, r) for b in range(batch) for h in range(heads) for r in starts]
    lowering.emit("attention_tiles", params, [q, key, value, out, *rest, *node.outputs[1:]], coords)


def attention_splits(
    rows: int, kv_heads: int, context: int, processors: int, least: int = 64
) -> int:
    """The number of parts into which the positions of each head are divided, so that most
    processors have one part. least: the smallest number of positions for which a part is worth its
    synchronisation.
    """
    wanted = max(1, processors // (rows * kv_heads))
    return min(wanted, max(1, context // least))


def are_older(
    lowering: Lowering, node: Node, kept: Sequence[ir.Tensor], position: ir.Tensor
) -> bool:
    """True if earlier iterations wrote all cache rows that would be streamed (copied to shared
    memory ahead of the tasks). This requires that ops only append to the caches, and that no op
    writes the position before this node. kept: the caches and, if they are in pages, the table of
    pages.
    """
    phase = [n for n in lowering.graph.nodes if n.phase == node.phase]
    written = {t.buffer.id for n in phase for t in n.outputs}
    before = {t.buffer.id for n in phase if n.id < node.id for t in n.outputs}
    return not {t.buffer.id for t in kept} & written and position.buffer.id not in before


def streamed_rows(cache: ir.Tensor, group: int, machine: Machine) -> int:
    """The number of positions whose keys and values fill a stage (a slot of the ring in shared
    memory through which caches are streamed). 0 if tasks read the caches in place.
    """
    width, row = cache.shape[-1], cache.dtype.nbytes(cache.shape[-1])
    if cache.dtype.name not in ("bf16", "fp16") or width not in (32, 64, 128):
        return 0
    rows = min(machine.stage_bytes // (2 * row) // STREAMED * STREAMED, MOST_STREAMED)
    if not machine.ring_bytes:
        return rows
    enough = min(machine.warps, MIN_STAGED_WARPS)
    fits = group <= MAX_GROUP_HEADS and staged_warps(group, width, machine) >= enough
    return rows if fits and machine.variant.role(COMMUNICATE) else 0


def lower_attention(lowering: Lowering, node: Node) -> None:
    """Emits attention for each sequence. Attention of a single row over a cache is divided by its
    positions; all other attention is divided into tiles of queries.
    """
    given = node.read(AttentionAttributes)
    placed = given.placed
    batch = node.inputs[3].shape[0] if placed else 1
    sinks = node.inputs[3 + placed] if given.sinks else None
    merges = []
    for b in range(batch):
        inputs = [t if t is sinks else lowering.part(t, batch, b) for t in node.inputs]
        outputs = tuple(lowering.part(t, batch, b) for t in node.outputs)
        one = dataclasses.replace(node, inputs=tuple(inputs), outputs=outputs)
        merges.append(_lower_sequence(lowering, one, b, batch))
    # All tasks that merge results come last, so that no processor waits for a merge before it has
    # computed all of its parts.
    added = [] if sinks is None else [sinks]
    for partial, one in (m for m in merges if m is not None):
        rows, heads, splits, width = partial.shape
        group = merge_group(batch * rows * heads, heads, 4 * splits * width, lowering.machine)
        merge = AttentionMergeParams(heads, given.head_dim, splits, group)
        coords = [(r, h) for r in range(rows) for h in range(0, heads, group)]
        operands = [partial, one.outputs[0], *added]
        lowering.emit("attention_merge", merge, operands, coords, ".merge")


def merge_group(heads: int, most: int, size: int, machine: Machine) -> int:
    """The number of heads for which one task merges the partial results. It is so large that no
    processor has several such tasks, if their data fits in shared memory. heads: the number of all
    heads to merge. most: the number of heads of a row; the result divides it. size: bytes of the
    partial results of one head.
    """
    room = machine.task_bytes // size
    wanted = min(-(-heads // machine.processors), room)
    return max(n for n in range(1, max(1, wanted) + 1) if most % n == 0)


def _divides_heads(lowering: Lowering, key: ir.Tensor, heads: int, batch: int, splits: int) -> bool:
    """True if `splits` tasks of a key/value head should divide its query heads instead of the
    positions. Then no task merges their results, but each task reads all keys and values, which
    must therefore fit in a cache (Costs.divided_heads_bytes).
    """
    machine, (kv_heads, context, width) = lowering.machine, key.shape
    keys = 2 * batch * key.dtype.nbytes(kv_heads * context * width)
    divides = batch > 1 and splits > 1 and heads // kv_heads % splits == 0
    return divides and keys <= machine.costs.divided_heads_bytes


def _lower_sequence(
    lowering: Lowering, node: Node, number: int, batch: int
) -> tuple[ir.Tensor, Node] | None:
    """Emits attention of one of `batch` sequences. If its positions are divided into several parts,
    returns the tensor of partial results and the node; otherwise None. number: the sequence's.
    """
    given = node.read(AttentionAttributes)
    tiled = dataclasses.replace(node, inputs=node.inputs[: 4 + given.sinks])
    if given.window and given.split and not lowering.machine.variant.role(COMMUNICATE):
        lower_attention_tiles(lowering, tiled)
        return None
    if (
        not given.split
        or len(node.inputs[0].shape) == 3
        or node.inputs[0].shape[0] >= MIN_TILED_QUERIES
        or divided_bytes(node) > lowering.machine.task_bytes
    ):
        lower_attention_tiles(lowering, node)
        return None
    q, key, value, position, *fresh = node.inputs
    fresh = fresh[1:] if given.sinks else fresh
    out = node.outputs[0]
    rows = out.shape[0]
    kv_heads, context, _ = key.shape
    window = given.window if given.window < context else 0
    seen = window or context
    machine = lowering.machine
    streamed = 0
    if fresh and are_older(lowering, node, (key, value), position):
        streamed = streamed_rows(key, given.heads // kv_heads, machine)
    # The smallest number of positions that one task reads. If keys and values are streamed through
    # the ring in shared memory, it is at least the number of positions in one stage of the ring.
    least = max(64, streamed)
    least *= 2 if streamed and batch > 1 and machine.ring_bytes else 1
    part = 4 * (given.head_dim + 2)  # in bytes
    # The merge polls all parts, so their number is at most about the cube root of `context`.
    if machine.has(Capability.PACKET_GATE):
        least = max(least, int(seen ** (2 / 3)))
    splits = attention_splits(rows * batch, kv_heads, seen, machine.processors, least)
    if machine.has(Capability.PACKET_GATE):  # parts that are not packets need one more counter
        splits = max(
            1, min(splits, machine.costs.packet_tensor_bytes // (rows * given.heads * part))
        )
    # If all positions fit in the ring, one task that reads all of them takes less time than two
    # tasks that read half of them each, plus the task that merges their results.
    if splits == 2 and batch > 1 and seen <= streamed * machine.variant.stages:
        splits = 1
    # The number of parts is limited, because the task that merges a head holds all of them in
    # shared memory.
    splits = max(1, min(splits, machine.task_bytes // part))
    if given.sinks and splits == 1:  # only the merge adds sinks
        lower_attention_tiles(lowering, tiled)
        return None
    shares = 1
    # Sinks are added only by the task that merges the parts of a head. So with sinks the positions
    # of a head are divided among tasks, and not its query heads.
    if not given.sinks and _divides_heads(lowering, key, given.heads, batch, splits):
        shares, splits = splits, 1
    params = AttentionParams(
        heads=given.heads,
        kv_heads=kv_heads,
        head_dim=given.head_dim,
        splits=splits,
        scale=given.scale,
        streamed=streamed,
        shares=shares,
        window=window,
    )
    places = [h * shares + share for share in range(shares) for h in range(kv_heads)]
    coords = [(r, h, s) for s in range(splits) for r in range(rows) for h in places]
    if splits == 1:
        group = lowering.emit("attention", params, [q, key, value, position, out, *fresh], coords)
        if shares > 1 and not node.processors and not node.hints:
            # Each task gets a processor of its own, if there are enough processors.
            first = number * len(coords)
            group.placement = [(first + i) % machine.processors for i in range(len(coords))]
        return None
    heads, width = given.heads, given.head_dim
    partial = lowering.temp((rows, heads, splits, width + 2), fp32, f"{node.name}.partial")
    operands = [q, key, value, position, partial, *fresh]
    lowering.emit("attention", params, operands, coords)
    return partial, node
