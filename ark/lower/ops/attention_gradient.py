"""Lowering of the gradients of attention: one op for the gradients of keys and values, and one for
that of queries. Each has tiles of rows, one task per tile. Called through ark.lower.registry.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ark.ir.attributes import AttentionAttributes
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.tasks.attention_gradient import AttentionGradientParams, scores


def lower_attention_gradient(lowering: Lowering, node: Node) -> None:
    """Emits the gradients of an attention. Both ops' tasks are dealt to the processors together, so
    that all processors have about the same work.
    """
    given, machine = node.read(AttentionAttributes), lowering.machine
    to_query, to_key, to_value = node.outputs
    lengths = node.inputs[0].shape[1], node.inputs[1].shape[1]
    groups, costs = [], list[float]()
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
        coords = [(b, h, r) for r in starts for b in range(batch) for h in range(given.heads)]
        suffix = ".keys" if keys else ".queries"
        operands = [*node.inputs, *results]
        groups.append(lowering.emit("attention_gradient", params, operands, coords, suffix))
        products = 4 if keys else 3
        costs += [products * scores(params, *lengths, r) for _, _, r in coords]
    if node.hints is None or node.hints.granularity is None:
        dealt = _dealt(costs, node.processors or (0, machine.processors))
        count = len(groups[0].coords)
        groups[0].placement, groups[1].placement = dealt[:count], dealt[count:]


def _dealt(costs: Sequence[float], processors: tuple[int, int]) -> list[int]:
    """For each task, its processor: from the longest task to the shortest, each is assigned to the
    processor that has the least work so far (Graham 1969). processors: the first one and the end.
    """
    loads = [(0.0, n) for n in range(*processors)]
    placement = [0] * len(costs)
    for task in sorted(range(len(costs)), key=lambda n: -costs[n]):
        load, processor = heapq.heappop(loads)
        placement[task] = processor
        heapq.heappush(loads, (load + costs[task], processor))
    return placement
