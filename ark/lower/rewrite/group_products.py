"""Places products of equal shape with the same left operand, such as those for queries, keys and
values, one after another, so that their tiles can fill all processors.

A processor runs its tasks in list order. If an op that reads the first product's result is between
two of these products, a processor waits for the first product before it can begin the second.
Listed in ark.lower.passes; ark.lower.rewrite.cut_products chooses the cut of these products by
their total time.
"""

from __future__ import annotations

from ark.ir.graph import Graph, Node
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.pack_weights import writes


def group_products(graph: Graph, context: Context) -> Graph:
    """The graph with products of equal shape and the same left operand next to each other, as far
    as dependences allow. The graph itself if the order does not change.
    """
    nodes: list[Node] = []
    last: dict[tuple[object, ...], Node] = {}  # by key: the last product
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
    """A key for grouping products: equal for products of equal shape that read the same left
    operand. node: a product.
    """
    left, right, *_ = node.inputs
    sizes = (right.dtype, right.shape, right.strides, node.outputs[0].dtype)
    return (node.phase, node.placement, left.buffer.id, left.offsets, left.shape, *sizes)


def _movable(node: Node) -> bool:
    asked = node.hints is not None or node.context is not None or node.processors is not None
    return node.type == "matmul" and not (asked or node.after)


def _depends(node: Node, earlier: Node) -> bool:
    """True if `node` must run after `earlier`, because one of them writes a buffer that the other
    accesses.
    """
    written = set(writes(earlier))
    touched = {t.buffer.id for t in (*earlier.inputs, *earlier.outputs, *earlier.after)} | written
    read = {t.buffer.id for t in node.inputs}
    return bool(written & read) or bool(touched & set(writes(node)))
