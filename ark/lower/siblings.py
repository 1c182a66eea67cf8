"""Divides the processors among neighbouring elementwise ops that do not depend on each other
(siblings), such as the rotations of queries and keys. Each op is divided into as many tasks as
corresponds to its fraction of all their elements. A processor then runs one large task of one op,
instead of a small task of each op one after another. Sums that only updates of parameters read run
beside other ops of a training step, too. Called by ark.lower.nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ark.ir.graph import Node
from ark.ir.values import overlap
from ark.tasks.node_expressions import is_elementwise

# The fraction of the processors for a sum that only updates of parameters read. No other op waits
# for it, and a few long tasks take less time in total than many short ones.
GRADIENT_SHARE = 1 / 4


def shares(nodes: Sequence[Node]) -> list[float]:
    """For each node, the fraction of the processors that it should use; 1.0 if it has no siblings.
    Ops of equal type and shape get the mean of their fractions, so that they get equal tiles and
    share one device function.
    """
    parts = [1.0] * len(nodes)
    run: list[int] = []
    for place, node in enumerate(nodes):
        if node.virtual:
            continue
        if not (run and _sibling(node, [nodes[i] for i in run])):
            _divide(nodes, run, parts)
            run = []
        run.append(place)
    _divide(nodes, run, parts)
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, node in enumerate(nodes):
        kinds = ((t.dtype, t.shape) for t in (*node.inputs, *node.outputs))
        alike[node.type, node.phase, tuple(kinds)].append(place)
    for places in alike.values():
        mean = sum(parts[i] for i in places) / len(places)
        for i in places:
            parts[i] = mean
    for place in _sums_for_updates(nodes):
        parts[place] = GRADIENT_SHARE
    return parts


def _sums_for_updates(nodes: Sequence[Node]) -> list[int]:
    """The places of sums that are only read by nodes that change memory which persists over
    iterations.
    """
    readers: dict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        for tensor in (*node.inputs, *node.after):
            readers[tensor.buffer.id].append(node)
    sums = ((i, n) for i, n in enumerate(nodes) if n.type == "reduce_sum")
    read = ((i, readers[node.outputs[0].buffer.id]) for i, node in sums)
    return [i for i, listed in read if listed and all(map(_updates, listed))]


def _updates(node: Node) -> bool:
    read = {t.buffer.id for t in node.inputs}
    return any(t.buffer.arena != "activation" and t.buffer.id in read for t in node.outputs)


def _divide(nodes: Sequence[Node], run: Sequence[int], parts: list[float]) -> None:
    """Sets the fractions of processors for the nodes of a run, in proportion to the sizes of their
    results. run: the nodes' positions. parts: the fractions, by position.
    """
    sizes = [nodes[i].outputs[0].elements for i in run] if len(run) > 1 else []
    for i, size in zip(run, sizes, strict=False):
        parts[i] = size / max(1, sum(sizes))


def _sibling(node: Node, run: Sequence[Node]) -> bool:
    """True if the node is an independent elementwise op like those of the run, so that it can run
    at the same time as all of them.
    """
    first = run[0]
    if not (_shared(node) and _shared(first)):
        return False
    if (node.phase, node.placement) != (first.phase, first.placement):
        return False
    return not any(_depends(node, earlier) or _depends(earlier, node) for earlier in run)


def _shared(node: Node) -> bool:
    placed = node.hints is not None or node.context is not None or node.processors is not None
    return is_elementwise(node) and not (placed or node.after)


def _depends(node: Node, other: Node) -> bool:
    """True if `node` accesses a buffer that `other` writes."""
    touched = (*node.inputs, *node.outputs)
    return any(overlap(out, t) for out in other.outputs for t in touched)
