"""Fuses the updates of an optimizer: consecutive elementwise nodes that write persistent memory,
such as a parameter and its moments, become one `fusion` node, which reads each operand once.
Listed in ark.lower.passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.ir.attributes import FusionAttributes
from ark.ir.dtype import FLOATS, fp32
from ark.ir.fold import MAX_FOLDED_DIMS
from ark.ir.graph import Graph, Node
from ark.ir.graph_view import WritesSoFar
from ark.ir.values import Tensor, overlap
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_regions import (
    MAX_SMALL_ELEMENTS,
    has_same_box,
    is_float_of_inputs,
)
from ark.plan.types import MAX_OPERANDS
from ark.tasks import expression
from ark.tasks.node_expressions import expression_of, is_elementwise


def fuse_updates(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which nodes that update persistent memory from the same tensors are
    one node each. A conversion that only such a node reads is computed in it.
    """
    touches = graph.view.touches
    nodes: list[Node | None] = []
    makers: dict[int, tuple[int, Node]] = {}  # by buffer: index and node of an elementwise result
    written = WritesSoFar()
    update, places = _Update(), list[int]()

    def end() -> None:
        nonlocal update, places
        if len(places) > 1:
            for tensor in tuple(update.inputs):
                maker = makers.get(tensor.buffer.id)
                private = tensor.buffer.arena == "activation" and (
                    tensor.buffer.id not in context.kept
                    and touches[tensor.buffer.id] == 1 + update.uses(tensor)
                )
                if maker is None or not private or written.behind(maker[0], maker[1].inputs):
                    continue
                if update.absorb(maker[1], tensor):
                    nodes[maker[0]] = None
            for place in places:
                nodes[place] = None
            nodes[places[-1]] = update.node()
        update, places = _Update(), []

    for node in graph.nodes:
        if not node.virtual:
            added = update.add(node)
            if not added:
                end()
                added = update.add(node)
            if added:
                places.append(len(nodes))
            if is_elementwise(node):
                makers[node.outputs[0].buffer.id] = (len(nodes), node)
        written.add(len(nodes), node)
        nodes.append(node)
    end()
    return graph.with_nodes(n for n in nodes if n is not None)


class _Update:
    """Elementwise nodes of one shape that one device function can compute. Their values are
    numbered in the order in which nodes are added; absorbed conversions are computed before.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.inputs: list[Tensor] = []
        self.absorbed: list[tuple[Tensor, Node]] = []

    def add(self, node: Node) -> bool:
        """Adds the node if it updates persistent memory and, unless it is the first, shares a whole
        operand with the nodes before. Returns True if it was added.
        """
        if not _updates(node):
            return False
        out = node.outputs[0]
        results = [n.outputs[0] for n in self.nodes]
        fresh = [t for t in node.inputs if not any(_is_same(t, r) for r in results)]
        first = self.nodes[0] if self.nodes else node
        listed = [*self.inputs, *(t for t in fresh if t not in self.inputs)]
        if self.nodes and (
            out.shape != first.outputs[0].shape
            or (node.placement, node.context) != (first.placement, first.context)
            or not any(
                t.shape == out.shape for t in node.inputs if t in self.inputs or t not in fresh
            )
            or any(overlap(t, r) for t in (*fresh, out) for r in results)
            or len(listed) + len(results) + 1 > MAX_OPERANDS
        ):
            return False
        if any(overlap(out, t) and not _is_same(out, t) for t in listed):
            return False
        self.inputs = listed
        self.nodes.append(node)
        return True

    def uses(self, tensor: Tensor) -> int:
        """The number of nodes' inputs that are this tensor."""
        return sum(t is tensor for n in self.nodes for t in n.inputs)

    def absorb(self, maker: Node, tensor: Tensor) -> bool:
        """Computes an input in the update itself. maker: the node that computes it. Returns False
        if that is not possible.
        """
        results = [n.outputs[0] for n in self.nodes]
        shapes = {t.shape for t in (*maker.inputs, *maker.outputs, tensor, results[0])}
        if (
            not _computes_float(maker)
            or len(shapes) > 1
            or (maker.placement, maker.context) != (self.nodes[0].placement, self.nodes[0].context)
            or any(overlap(t, r) and not _is_same(t, r) for t in maker.inputs for r in results)
            or len(self.inputs) + len(maker.inputs) + len(results) > MAX_OPERANDS
        ):
            return False
        self.inputs.remove(tensor)
        self.inputs += [t for t in dict.fromkeys(maker.inputs) if t not in self.inputs]
        self.absorbed.append((tensor, maker))
        return True

    def node(self) -> Node:
        """The node that computes all results."""
        last, count = self.nodes[-1], len(self.inputs)
        trees: list[expression.Tree] = []
        numbers = {t.id: i for i, t in enumerate(self.inputs)}
        for tensor, maker in self.absorbed:
            trees.append(
                _stored_value(maker, [expression.leaf(numbers[t.id]) for t in maker.inputs])
            )
            numbers[tensor.id] = count + len(trees) - 1
        stores: list[int] = []
        for node in self.nodes:
            leaves = []
            for tensor in node.inputs:
                earlier = [n for n in self.nodes[: len(stores)] if _is_same(tensor, n.outputs[0])]
                known = stores[self.nodes.index(earlier[0])] if earlier else numbers[tensor.id]
                leaves.append(expression.leaf(known))
            trees.append(_stored_value(node, leaves))
            stores.append(count + len(trees) - 1)
        given = FusionAttributes(
            first=[], each=[], sums=[], last=trees, axis=-1, count=1, stores=stores
        )
        members = (*(maker for _, maker in self.absorbed), *self.nodes)
        outputs = (n.outputs[0] for n in self.nodes)
        return last.fused("fusion", self.inputs, outputs, given.to_node(), members)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """True if both tensors are the same box of the same memory."""
    return a.buffer.id == b.buffer.id and has_same_box(a, b)


def _stored_value(node: Node, leaves: Sequence[expression.Tree]) -> expression.Tree:
    """The node's expression, rounded to the type of its result."""
    tree, out = expression.substitute(expression_of(node), leaves), node.outputs[0].dtype
    rounded = out == fp32 or tree[:2] == ["cast", out.name]
    return tree if rounded else ["cast", out.name, tree]


def _computes_float(node: Node) -> bool:
    return (
        is_elementwise(node)
        and node.hints is None
        and all(t.dtype in FLOATS for t in (*node.inputs, *node.outputs))
        and 1 <= len(node.outputs[0].shape) <= MAX_FOLDED_DIMS
        and is_float_of_inputs(expression_of(node), len(node.inputs))
    )


def _updates(node: Node) -> bool:
    """True for an elementwise node of floating-point numbers that writes persistent memory. Small
    ones are left to `fuse_regions`.
    """
    return (
        not node.virtual
        and _computes_float(node)
        and node.outputs[0].elements > MAX_SMALL_ELEMENTS
        and node.outputs[0].buffer.arena != "activation"
        and all(t.shape == node.outputs[0].shape or t.elements == 1 for t in node.inputs)
    )
