"""Joins two reductions of the same columns in one node, which reads the columns once.

The means of columns and the sums of squared differences from them, which a batch norm needs, become
the columns' moments. Two nodes would read all elements twice, and the second would wait for the
means. Two sums, as in a batch norm's gradient (of the gradient, and of its product with the
differences from the means), become one node too. Called by ark.lower.rewrite.fuse_reduction_terms.
"""

from __future__ import annotations

import math

from msgspec import structs

from ark.ir.attributes import ReduceAttributes
from ark.ir.dtype import fp32
from ark.ir.graph import Graph, Node
from ark.ir.graph_view import WritesSoFar
from ark.ir.values import Tensor
from ark.lower.rewrite.views import same_elements
from ark.tasks import expression

_DIFFERENCE = ["sub", expression.leaf(0), expression.leaf(1)]


def join_reductions(graph: Graph) -> Graph:
    """A copy of the graph with pairs of reductions of the same columns joined."""
    first: dict[int, tuple[int, Node]] = {}  # by the buffers that a second one reads
    written = WritesSoFar()
    nodes: list[Node | None] = []
    for place, node in enumerate(graph.nodes):
        nodes.append(node)
        if node.type == "reduce_mean":
            first[node.outputs[0].buffer.id] = place, node
        elif node.type == "reduce_sum" and len(node.inputs) == 1:
            first[node.inputs[0].buffer.id] = place, node
        elif node.type == "reduce_sum":
            for tensor in node.inputs[:2]:
                at, other = first.get(tensor.buffer.id, (-1, node))
                # Moments replace the means. The term of a second sum may not need the first sum.
                own = {t.buffer.id for t in other.outputs if other.type == "reduce_mean"}
                read = [t for t in (*other.inputs, *node.inputs) if t.buffer.id not in own]
                stale = written.behind(at - 1, read) or written.behind(at, other.outputs)
                joined = None if at < 0 or stale else _joined(graph, other, node, tensor)
                if joined is not None:
                    nodes[at], nodes[place] = joined, None
                    del first[tensor.buffer.id]
                    break
        written.add(place, node)
    return graph.with_nodes(n for n in nodes if n is not None)


def _joined(graph: Graph, first: Node, last: Node, shared: Tensor) -> Node | None:
    """The node that replaces two reductions; None if they do not reduce the same columns to moments
    or to two sums. shared: the input of `last` that `first` adds, or its means.
    """
    given, terms = first.read(ReduceAttributes), last.read(ReduceAttributes)
    (source, *others), (total,) = first.inputs, last.outputs
    alike = given.axis == terms.axis and given.keepdims and terms.keepdims
    columns = math.prod(source.shape[given.axis + 1 :]) > 1
    types = {t.dtype for t in (source, *last.inputs, total, first.outputs[0])}
    if others or given.term or not alike or not columns or types != {fp32}:
        return None
    asked = first.hints or last.hints or first.after or last.after
    alone = len(graph.view.writers[total.buffer.id]) == 1 and total.buffer.arena == "activation"
    if asked or first.placement != last.placement or not alone:
        return None  # if not alone, an earlier op may access the memory of the sum
    outputs = (first.outputs[0], total)
    if first.type == "reduce_mean":
        read, square = last.inputs[0], ["mul", _DIFFERENCE, _DIFFERENCE]
        same = same_elements(read, source) and read.shape == source.shape
        if not same or not same_elements(shared, first.outputs[0]) or terms.term != square:
            return None
        attrs = ReduceAttributes(function="moments", axis=given.axis, keepdims=True)
        return first.fused("reduce_moments", (source,), outputs, attrs.to_node(), (first, last))
    box = shared.shape, shared.extents, shared.offsets
    if terms.term is None or box != (source.shape, source.extents, source.offsets):
        return None
    inputs, term = list(last.inputs), terms.term
    if inputs[0].id != shared.id:
        inputs[:2] = inputs[1::-1]
        leaves = [expression.leaf(i) for i in (1, 0, *range(2, len(inputs)))]
        term = list(expression.substitute(term, leaves))
    sums = structs.replace(terms, function="sums", term=term)
    return last.fused("reduce_sums", inputs, outputs, sums.to_node(), (first, last))
