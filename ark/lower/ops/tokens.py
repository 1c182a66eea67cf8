"""Lowering of the ops of a decoder's loop over tokens: embed, sample, choose, advance."""

from __future__ import annotations

import functools

from ark.ir.attributes import ChooseAttributes, RowsAttributes, SampleAttributes
from ark.ir.dtype import fp32
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.tasks.advance import AdvanceParams
from ark.tasks.linear_form import MAX_UNIT_INPUT_ROWS
from ark.tasks.tokens import EmbeddingParams, SampleParams


def lower_embed(lowering: Lowering, node: Node) -> None:
    ids, table, position = node.inputs
    out, *copies = node.outputs
    rows, width = out.shape
    batch, processors = position.shape[0], lowering.machine.processors
    # With many sequences each processor gets at most one task, because two tasks would take longer
    # than one larger task.
    each_row = processors // rows if batch > MAX_UNIT_INPUT_ROWS else -(-processors // rows)
    parts = max(1, min(width // 64, each_row))
    columns = -(-width // parts)
    each = max(1, -(-rows // batch // processors)) if parts == 1 else 1
    params = EmbeddingParams(rows=each, columns=columns, dynamic=True)
    coords = [(r, c) for r in range(0, rows // batch, each) for c in range(0, width, columns)]
    for b in range(batch):
        of = functools.partial(lowering.part, parts=batch, number=b)
        operands = [of(ids), table, of(out), of(position), *map(of, copies)]
        lowering.emit("embedding", params, operands, coords)


def lower_advance(lowering: Lowering, node: Node) -> None:
    lowering.emit(
        "advance", AdvanceParams(node.read(RowsAttributes).rows), list(node.inputs), [(0,)]
    )


def lower_sample(lowering: Lowering, node: Node) -> None:
    """Emits tasks that find the best token in each tile of the logits, and one task that chooses
    among these candidates.

    shares: the number of parts of the logits, one from each rank; the first part is this rank's own
    (ark.lower.rewrite.rotate_logits).
    """
    shares = node.read(SampleAttributes).shares
    logits, settings, position, *others = node.inputs
    tiles = max(1, min(lowering.machine.processors, logits.shape[1] // 256))
    candidates = lowering.temp((tiles, 2), fp32, f"{node.name}.candidates")
    first = [logits, settings, position, candidates]
    params = SampleParams(tiles, shares, lowering.graph.rank if shares > 1 else 0)
    lowering.emit("sample", params, first, [(i,) for i in range(tiles)])
    lowering.emit("choose", params, [*first, *others], [(0,)], ".choose")


def lower_choose(lowering: Lowering, node: Node) -> None:
    """Emits one task that chooses among the candidate tokens that a linear layer's tasks, on this
    rank or on all ranks, have found.
    """
    given = node.read(ChooseAttributes)
    first = lowering.graph.rank if given.shares > 1 else 0
    params = SampleParams(given.tiles, given.shares, first)
    group = lowering.emit("choose", params, list(node.inputs), [(0,)])
    if given.counter:
        group.awaits = [tuple((s, given.signals) for s in lowering.own_counters(given.counter))]
