"""Fuses the multiplication by a weight and the addition of a bias into the layer norm before them:
`layernorm(x) * weight + bias` becomes one op that reads x and writes the result once. Intermediate
values are fp32, as in fused chains.

Listed in ark.lower.passes after the pass that fuses chains of elementwise ops.
"""

from __future__ import annotations

from ark.ir.dtype import FLOATS
from ark.ir.graph import Graph, Node
from ark.ir.graph_view import WritesSoFar
from ark.ir.values import Tensor, dense_view
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_chains import read_once
from ark.lower.rewrite.views import same_elements, seen_in
from ark.tasks.node_expressions import expression_of, is_elementwise


def fuse_norm_scales(graph: Graph, context: Context) -> Graph:
    """A copy of the graph with weights and biases fused into layer norms."""
    kept = context.kept
    private = read_once(graph, kept)
    norms: dict[int, tuple[int, Node]] = {}  # by buffer: index and node
    written = WritesSoFar()
    nodes: list[Node | None] = []
    for place, node in enumerate(graph.nodes):
        if is_elementwise(node):
            read = next((t for t in node.inputs if t.buffer.id in norms), None)
            if read is not None:
                at, norm = norms[read.buffer.id]
                joined = _joined(norm, node, read)
                if joined is not None and not written.behind(at, norm.inputs[:1]):
                    nodes[at], node = None, joined
        elif _unweighted(node) and private(node.outputs[0]):
            norms[node.outputs[0].buffer.id] = place, node
        written.add(place, node)
        nodes.append(node)
    return graph.with_nodes(n for n in nodes if n is not None)


def _unweighted(node: Node) -> bool:
    """True for a layer norm that has neither a weight nor hints of the user."""
    return node.type == "layernorm" and len(node.inputs) == 1 and not node.hints


def _joined(norm: Node, node: Node, read: Tensor) -> Node | None:
    """The layer norm with the weight (and bias) that the elementwise node applies to its result;
    None if the node computes something else. read: the input of `node` that is the norm's result.
    """
    normed = norm.outputs[0]
    if norm.placement != node.placement or node.hints or node.outputs[0].shape != read.shape:
        return None
    if read.id == normed.id:
        seen: Node | None = node
    else:
        seen = seen_in(node, normed.shape) if same_elements(read, normed) else None
    if seen is None:
        return None
    place = next(i for i, t in enumerate(seen.inputs) if t.buffer.id == normed.buffer.id)
    rows = _scales(expression_of(seen), place)
    out, columns = seen.outputs[0], normed.shape[-1:]
    if rows is None or out.dtype not in FLOATS or out.shape != normed.shape:
        return None
    given = [seen.inputs[i] for i in rows]
    taken = {t.buffer.id for t in (norm.inputs[0], *given)}
    fits = all(
        t.dtype in FLOATS
        and t.shape[-1:] == columns == (t.elements,)
        and t.dense
        and dense_view(t, columns) is not None
        for t in given
    )
    if not fits or out.buffer.id in taken:
        return None
    inputs = (norm.inputs[0], *given)
    return node.fused("layernorm", inputs, (out,), norm.attrs, (norm, node), norm.name)


def _scales(tree: object, place: int) -> list[int] | None:
    """The indices of the weight and, if there is one, the bias, in an expression of the form
    `input * weight` or `input * weight + bias`; None for other expressions. place: the index of
    `input`.
    """
    weighted, bias = tree, None
    match tree:
        case ["add", ["mul", *_] as product, ["input", int(i)]]:
            weighted, bias = product, i
        case ["add", ["input", int(i)], ["mul", *_] as product]:
            weighted, bias = product, i
    match weighted:
        case ["mul", ["input", int(a), *_], ["input", int(b), *_]] if place in (a, b) and a != b:
            scales = [b if a == place else a, *([] if bias is None else [bias])]
            return None if place in scales else scales
    return None
