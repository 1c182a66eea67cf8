"""Fuses chains of elementwise ops into one op with one expression, which reads its inputs and
writes its result once.

A result that only the next elementwise op reads is not written. Within a fused op, values stay in
fp32, whereas separate ops would round to the intermediate tensor's type. An ark.cast still rounds
to its type, and a constant is rounded to the type of its tensor. Listed in ark.lower.passes.
"""

from __future__ import annotations

from collections.abc import Callable

from ark.ir.graph import Graph, Node
from ark.ir.graph_view import WritesSoFar
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.views import same_elements, seen_in
from ark.tasks import expression
from ark.tasks.node_expressions import expression_of, is_elementwise

MAX_INPUTS = 16  # most operands that a task loads; with more, registers would not suffice


def _repeated(node: Node) -> list[Tensor]:
    """The inputs that are the same tensor as an earlier input of the node."""
    return [t for i, t in enumerate(node.inputs) if t.id in {u.id for u in node.inputs[:i]}]


def read_once(
    graph: Graph, kept: frozenset[int], repeated_inputs: bool = False
) -> Callable[[Tensor], bool]:
    """A function that returns True for a tensor that only one node writes and only one other node
    reads. These two nodes may then be fused. kept: ids of buffers that are read from outside of the
    graph. repeated_inputs: True if the reader may have the tensor as several of its inputs.
    """
    touches = graph.view.touches
    if repeated_inputs:
        touches = touches.copy()
        for node in graph.nodes:
            touches.subtract(t.buffer.id for t in _repeated(node))

    def private(out: Tensor) -> bool:
        unshared = out.buffer.arena == "activation" and out.buffer.id not in kept
        return unshared and touches[out.buffer.id] == 2

    return private


def fuse_chains(graph: Graph, context: Context) -> Graph:
    """A copy of the graph with chains of elementwise ops fused. If two readers of a result are
    fused with each other, the result has a single reader and can itself be fused. So rounds of
    fusing are repeated until nothing changes.
    """
    return joined_chains(graph, context.kept)


def joined_chains(
    graph: Graph, kept: frozenset[int], fits: Callable[[Node], bool] = lambda _: True
) -> Graph:
    """The graph with chains of elementwise ops joined, as long as `fits` accepts the joined op.
    kept: ids of buffers that are read from outside of the graph.
    """
    while True:
        joined = _joined_once(graph, kept, fits)
        if len(joined.nodes) == len(graph.nodes):
            return joined
        graph = joined


def _joined_once(graph: Graph, kept: frozenset[int], fits: Callable[[Node], bool]) -> Graph:
    """The graph after one round of fusing: each elementwise op whose result only one elementwise op
    reads is fused into its reader.
    """
    private = read_once(graph, kept, repeated_inputs=True)
    producer: dict[int, tuple[int, Node]] = {}  # by buffer: index and node of a fusible result
    written = WritesSoFar()
    nodes: list[Node | None] = []
    for place, node in enumerate(graph.nodes):
        if is_elementwise(node):
            for tensor in node.inputs:
                maker = producer.get(tensor.buffer.id)
                unlike = tensor.shape != node.outputs[0].shape or tensor.dtype.packed
                if maker is None or unlike:
                    continue
                before = maker[1]
                stale = written.behind(maker[0], before.inputs)
                joined = None if stale else _join_seen(before, node, tensor)
                if joined is not None and fits(joined):
                    nodes[maker[0]] = None
                    node = joined
            out = node.outputs[0]
            if private(out):
                producer[out.buffer.id] = (place, node)
        written.add(place, node)
        nodes.append(node)
    return graph.with_nodes(n for n in nodes if n is not None)


def _join_seen(before: Node, node: Node, read: Tensor) -> Node | None:
    """Fuses two elementwise nodes into one; returns None if that is not possible. If their shapes
    differ, one node is first changed to the shape of the other. read: the input of `node` that is
    the result of `before`.
    """
    between = before.outputs[0]
    if between.shape == read.shape:
        wanted = (read.extents, read.offsets, read.dtype)
        same = (between.extents, between.offsets, between.dtype) == wanted
        return _join(before, node, read) if same else None
    placed = any(expression.places(expression_of(n)) for n in (before, node))
    if placed or not same_elements(read, between):
        return None
    seen = seen_in(before, read.shape)
    joined = _join(seen, node, read) if seen is not None else None
    if joined is None:
        later = seen_in(node, between.shape)
        joined = _join(before, later, read) if later is not None else None
    return joined


def _join(before: Node, node: Node, between: Tensor) -> Node | None:
    """Fuses two elementwise nodes of the same shape into one; returns None if they cannot be fused.
    between: the result of `before`, which `node` reads.
    """
    if before.placement != node.placement:
        return None
    inputs: list[Tensor] = []

    def leaf(tensor: Tensor) -> expression.Tree:
        if tensor not in inputs:
            inputs.append(tensor)
        return expression.leaf(inputs.index(tensor))

    def inner() -> expression.Tree:
        return expression.substitute(expression_of(before), [leaf(t) for t in before.inputs])

    arguments = [inner() if t.id == between.id else leaf(t) for t in node.inputs]
    tree = expression.substitute(expression_of(node), arguments)
    if len(inputs) > MAX_INPUTS or expression.size(tree) > expression.MAX_NODES:
        return None
    if expression.places(tree) and any(t.dtype.packed for t in (*inputs, *node.outputs)):
        return None
    return node.fused("elementwise", inputs, node.outputs, {"expr": tree}, (before, node))
