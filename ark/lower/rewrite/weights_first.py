"""Moves small ops that depend only on weights, such as a transpose of a convolution's weights or
the factors of a batch norm, to the beginning of their phase, where all of them run side by side. At
its place in program order, such an op would wait for two reasons: processors run tasks in list
order, and its result may be placed in memory of an earlier tensor that other tasks still read.
Listed in ark.lower.passes.
"""

from __future__ import annotations

from collections import defaultdict

from ark.ir.graph import Graph, Node
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.pack_weights import writes
from ark.machine import Machine
from ark.machine.variant import COMMUNICATE
from ark.tasks.node_expressions import is_elementwise

COPIES = ("transpose", "remap", "copy")
MAX_CACHE_SHARE = 1 / 2  # of the last-level cache that all of these results may fill


def weights_first(graph: Graph, context: Context) -> Graph:
    """The graph with small ops that read only weights, inputs and results of each other at the
    beginning of their phase. The graph itself if the order does not change.
    """
    first: dict[int, list[Node]] = defaultdict(list)
    rest: dict[int, list[Node]] = defaultdict(list)
    unwritten: dict[int, set[int]] = defaultdict(set)  # by phase: buffers that no other op writes
    written: dict[int, set[int]] = defaultdict(set)
    for node in graph.nodes:
        written[node.phase] |= {t.buffer.id for t in node.outputs} | set(writes(node))
    touched: set[int] = set()
    filled: dict[int, int] = defaultdict(int)
    for node in graph.nodes:
        machine, phase = context.machines[node.phase], node.phase
        fixed = all(t.buffer.id not in written[phase] - unwritten[phase] for t in node.inputs)
        new = not any(t.buffer.id in touched for t in node.outputs)
        size = sum(t.nbytes for t in node.outputs)
        fits = filled[phase] + size <= MAX_CACHE_SHARE * machine.costs.cache_bytes
        if fixed and new and fits and _movable(graph, node, machine):
            filled[phase] += size
            first[phase].append(node)
            unwritten[phase] |= {t.buffer.id for t in node.outputs}
        else:
            rest[phase].append(node)
        touched |= {t.buffer.id for t in (*node.inputs, *node.outputs, *node.after)}
    nodes = [n for phase in sorted({*rest, *first}) for n in (*first[phase], *rest[phase])]
    return graph if nodes == list(graph.nodes) else graph.with_nodes(nodes)


def _movable(graph: Graph, node: Node, machine: Machine) -> bool:
    """True if a node may be moved to the beginning of its phase. On a GPU, these are copies of too
    few bytes to keep all processors busy, and elementwise ops with few elements. Each result must
    have a buffer of its own.
    """
    if node.virtual or node.after:
        return False
    little = is_elementwise(node) and node.outputs[0].elements <= machine.costs.little_elements
    if not (node.type in COPIES or little):
        return False
    if node.hints is not None or node.processors is not None or node.context is not None:
        return False
    if machine.variant.role(COMMUNICATE) or not machine.coalesces:
        return False
    few = sum(t.nbytes for t in (*node.inputs, *node.outputs))
    own = all(
        t.buffer.arena == "activation" and len(graph.view.writers[t.buffer.id]) == 1
        for t in node.outputs
    )
    return own and few <= machine.costs.idle_bytes * machine.processors
