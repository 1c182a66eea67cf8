"""Reorders products of equal shape with the same left operand, such as those for queries, keys and
values, so that their tiles fill the processors together.

A processor runs its tasks in the order of its list, so that a product behind an op that reads the
one before it waits for that one. Listed in ark.lower.passes; ark.lower.rewrite.cut_products cuts
such products by what all of them take.
"""

from __future__ import annotations

from ark.ir.graph import Graph, Node
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.pack_weights import writes


def group_products(graph: Graph, context: Context) -> Graph:
    """The graph with such products side by side; every dependence is kept.

    The graph itself is returned if the order stays as it was.
    """
    nodes: list[Node] = []
    last: dict[tuple[object, ...], Node] = {}  # of the products with that key
    for node in graph.nodes:
        place = len(nodes)
        if _movable(node):
            key = sharing(node)
            if key in last:
                first = next(i for i, n in enumerate(nodes) if n is last[key]) + 1
                if not any(_depends(node, n) for n in nodes[first:]):
                    place = first
            last[key] = node
        nodes.insert(place, node)
    return graph if nodes == graph.nodes else graph.with_nodes(nodes)


def sharing(node: Node) -> tuple[object, ...]:
    """Equal for products of equal shape that read the same left side. node: a product."""
    left, right, *_ = node.inputs
    sizes = (right.dtype, right.shape, right.strides, node.outputs[0].dtype)
    return (node.phase, node.placement, left.buffer.id, left.offsets, left.shape, *sizes)


def _movable(node: Node) -> bool:
    asked = node.hints is not None or node.context is not None or node.processors is not None
    return node.type == "matmul" and not (asked or node.after)


def _depends(node: Node, earlier: Node) -> bool:
    """True where the node must come after the earlier one."""
    written = set(writes(earlier))
    touched = {t.buffer.id for t in (*earlier.inputs, *earlier.outputs, *earlier.after)} | written
    read = {t.buffer.id for t in node.inputs}
    return bool(written & read) or bool(touched & set(writes(node)))
