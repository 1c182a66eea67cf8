"""The ops of a decoder's token loop, as checkpoints need them: embedding at a position, rotary
embedding with cache append, attention over the cache, gated activation, sampling.

Graph builders (ark.models) add these nodes; lowerings only. What users call is in ark.ops.attention
and ark.ops.movement.
"""

from __future__ import annotations

from ark.ir.dtype import fp32
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.lower.registry import register
from ark.lower.tiling import split
from ark.ops.attention import attention_reference


def _lower_embedding(lowering: Lowering, node: Node) -> None:
    ids, table, *position = node.inputs
    out = node.outputs[0]
    rows, width = out.shape
    pieces = max(1, min(width // 64, -(-lowering.machine.processors // rows)))
    columns = -(-width // pieces)
    params = {"rows": 1, "columns": columns, "dynamic": bool(position)}
    coords = [(r, c) for r in range(rows) for c in range(0, width, columns)]
    lowering.emit("embedding", params, [ids, table, out, *position], coords)


def attention_splits(rows: int, kv_heads: int, context: int, processors: int) -> int:
    """Into how many parts a head's positions are cut so that most processors have one."""
    wanted = max(1, processors // (rows * kv_heads))
    return min(wanted, max(1, context // 64))


def _lower_attention(lowering: Lowering, node: Node) -> None:
    q, key, value, position, *fresh = node.inputs
    out = node.outputs[0]
    rows = out.shape[0]
    kv_heads, context, _ = key.shape
    splits = attention_splits(rows, kv_heads, context, lowering.machine.processors)
    params = {**node.attrs, "kv_heads": kv_heads, "splits": splits}
    coords = [(r, h, s) for s in range(splits) for r in range(rows) for h in range(kv_heads)]
    if splits == 1:
        lowering.emit("attention", params, [q, key, value, position, out, *fresh], coords)
        return
    heads, width = node.attrs["heads"], node.attrs["head_dim"]
    partial = lowering.temp((rows, heads, splits, width + 2), fp32, f"{node.name}.partial")
    operands = [q, key, value, position, partial, *fresh]
    lowering.emit("attention", params, operands, coords)
    merge = {"heads": heads, "head_dim": width, "splits": splits}
    lowering.emit(
        "attention_merge",
        merge,
        [partial, out],
        [(r, h) for r in range(rows) for h in range(heads)],
        ".merge",
    )


def _lower_sample(lowering: Lowering, node: Node) -> None:
    logits, settings, position, tokens, output, stops = node.inputs
    vocabulary = logits.shape[1]
    tiles = max(1, min(lowering.machine.processors, vocabulary // 256))
    candidates = lowering.temp((tiles, 2), fp32, f"{node.name}.candidates")
    lowering.emit(
        "sample",
        {"tiles": tiles},
        [logits, settings, position, candidates],
        [(i,) for i in range(tiles)],
    )
    lowering.emit(
        "choose",
        {"tiles": tiles},
        [logits, settings, position, candidates, tokens, output, stops],
        [(0,)],
        ".choose",
    )


def _lower_advance(lowering: Lowering, node: Node) -> None:
    lowering.emit("advance", {"rows": node.attrs["rows"]}, list(node.inputs), [(0,)])


def _lower_rope_kv(lowering: Lowering, node: Node) -> None:
    """Cuts columns only: rows share the caches."""
    x = node.inputs[0]
    operands = [x, node.outputs[0], *node.inputs[1:], *node.outputs[1:]]
    parts = split(x.shape[1] // 2, lowering.machine.processors)
    lowering.emit("rope_kv", node.attrs, operands, [(a * 2, b * 2) for a, b in parts])


def _lower_swiglu(lowering: Lowering, node: Node) -> None:
    x = node.inputs[0]
    rows, width = x.shape
    parts = split(width // 2, -(-lowering.machine.processors // rows))
    coords = [(r, a * 2, b * 2) for r in range(rows) for a, b in parts]
    lowering.emit("swiglu", {}, [x, node.outputs[0]], coords)


register("attention", attention_reference, _lower_attention, apart=False)
for _name, _lower in (
    ("embed", _lower_embedding),
    ("sample", _lower_sample),
    ("advance", _lower_advance),
    ("rope_kv", _lower_rope_kv),
    ("swiglu", _lower_swiglu),
):
    register(_name, None, _lower)
