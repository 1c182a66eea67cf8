"""Lowering of sampling with all options, such as penalties and biases of logits."""

from __future__ import annotations

from ark.ir.dtype import fp32
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.tasks.adjusted import AdjustParams, SampleAdjustedParams
from ark.tasks.sequences import ChooseEachParams
from ark.tasks.tokens import SampleParams

MIN_TILE_ELEMENTS = 256


def lower_sample_adjusted(lowering: Lowering, node: Node) -> None:
    """Emits tasks that sample a token for each sequence. For each sequence, several tasks adjust
    tiles of its logits, and one task samples. One further task stores the chosen tokens of all
    sequences.
    """
    state, leave = node.inputs[:11], node.inputs[11:]
    logits, settings, position, tokens, output, stops, options, *more = state
    bias, allowed, counts, logprobs = more
    batch, vocabulary = logits.shape
    processors = lowering.machine.processors
    tiles = max(1, min(processors // batch, vocabulary // MIN_TILE_ELEMENTS))
    top = (logprobs.elements // tokens.elements - 1) // 2
    scores, candidates, shares, drawn = (
        lowering.temp((batch * rows, columns), fp32, f"{node.name}.{name}")
        for name, rows, columns in (
            ("scores", 1, vocabulary),
            ("candidates", tiles, 2),
            ("shares", tiles, 3),
            ("drawn", 1, 2),
        )
    )
    for b in range(batch):
        own = [lowering.part(t, batch, b) for t in (logits, options, settings, position, tokens)]
        own.append(stops)
        others = (bias, counts, scores, candidates, shares, allowed, drawn, logprobs)
        parts = [lowering.part(t, batch, b) for t in others]
        lowering.emit(
            "adjust_logits",
            AdjustParams(tiles),
            [*own, *parts[:6]],
            [(i,) for i in range(tiles)],
            f".{b}.adjust",
        )
        operands = [*own, *parts[2:5], parts[1], *parts[6:]]
        lowering.emit(
            "sample_adjusted", SampleAdjustedParams(tiles, top), operands, [(0,)], f".{b}"
        )
    chosen = [logits, settings, position, drawn, tokens, output, stops, *leave]
    if batch == 1 and not leave:
        lowering.emit("choose", SampleParams(1), chosen, [(0,)], ".choose")
    else:
        lowering.emit("choose_each", ChooseEachParams(1, batch), chosen, [(0,)], ".choose")
