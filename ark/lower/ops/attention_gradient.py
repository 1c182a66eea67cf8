"""Lowering of the gradients of attention: one op for the gradients of keys and values, and one for
that of queries. Each has tiles of rows, one task per tile. Called through ark.lower.registry.
"""

from __future__ import annotations

from ark.ir.attributes import AttentionAttributes
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.tasks.attention_gradient import AttentionGradientParams


def lower_attention_gradient(lowering: Lowering, node: Node) -> None:
    """Emits the gradients of an attention. With a causal mask the tiles that meet most rows come
    first, so that the last tasks to end are short.
    """
    given, machine = node.read(AttentionAttributes), lowering.machine
    reads = list(node.inputs)
    to_query, to_key, to_value = node.outputs
    for keys, results in ((True, [to_key, to_value]), (False, [to_query])):
        batch, length, _ = results[0].shape
        rows = min(machine.attention_rows if machine.cooperative else 32, length)
        params = AttentionGradientParams(
            heads=given.heads,
            head_dim=given.head_dim,
            rows=rows,
            scale=given.scale,
            causal=given.causal,
            keys=keys,
            mask=given.mask,
            fill=given.fill,
        )
        starts = range(0, length, rows)
        ordered = starts if keys or not given.causal else starts[::-1]
        coords = [(b, h, r) for r in ordered for b in range(batch) for h in range(given.heads)]
        suffix = ".keys" if keys else ".queries"
        lowering.emit("attention_gradient", params, [*reads, *results], coords, suffix)
