"""Fuses elementwise ops on the products of chosen experts into these products. In a mixture of
experts, each row is multiplied by the weights of a few chosen experts. The fused ops are biases by
expert, a gated activation of two products of one input, and the sum of the results of a row's
experts, weighted by their scores, with a residual. The softmax of the scores, or of the chosen
scores, is fused into the choice of the experts. ark.tasks.expert_epilogue describes the epilogue.
Products with only a part of the experts (if several ranks share the experts) are not changed.
Listed in ark.lower.passes after chains are fused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from msgspec import structs

from ark.ir.attributes import (
    AxisAttributes,
    ExpertLinearAttributes,
    ReduceAttributes,
    TopKAttributes,
)
from ark.ir.dtype import FLOATS, fp32
from ark.ir.graph import Graph, Node
from ark.ir.graph_view import WritesSoFar
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_chains import read_once
from ark.machine import Machine
from ark.tasks import expression
from ark.tasks.expert_epilogue import MAX_SLOTS
from ark.tasks.experts import takes_row_softmax, takes_softmax
from ark.tasks.node_expressions import expression_of, is_elementwise

MAX_EPILOGUE_TABLES = 4  # the most tables, and the most scores, of an epilogue


def fuse_experts(graph: Graph, context: Context) -> Graph:
    """A copy of the graph with elementwise nodes and sums fused into experts' products."""
    private = read_once(graph, context.kept)
    fusible: dict[int, tuple[int, Node]] = {}  # by buffer: index and node of a fusible result
    written = WritesSoFar()
    nodes: list[Node | None] = []
    for place, node in enumerate(graph.nodes):
        used = [fusible[t.buffer.id] for t in node.inputs if t.buffer.id in fusible]
        joined = None
        if used and not any(written.behind(at, n.inputs) for at, n in used):
            makers = [n for _, n in used]
            joined = _finished(node, makers) or _total(node, makers) or _added(node, makers)
            joined = joined or _of_row(node, makers, context.machine)
        chosen = _softmax(node, used[0][1], context.machine) if len(used) == 1 else None
        if chosen is not None:
            nodes[used[0][0]] = chosen  # where the numbers of the experts are known, too
            nodes.append(None)
            continue
        if joined is not None:
            kept = {t.buffer.id for t in joined.inputs}
            for at, n in used:
                if n.outputs[0].buffer.id not in kept:
                    nodes[at] = None
            node = joined
        if node.type in ("expert_linear", "gather", "softmax", "topk") and private(node.outputs[0]):
            fusible[node.outputs[0].buffer.id] = place, node
        written.add(place, node)
        nodes.append(node)
    return graph.with_nodes(n for n in nodes if n is not None)


def _softmax(node: Node, choice: Node, machine: Machine) -> Node | None:
    """A top-k fused with the softmax of its values; None if that is not possible."""
    if (node.type, choice.type) != ("softmax", "topk") or node.hints or choice.hints:
        return None
    given, values = choice.read(TopKAttributes), choice.outputs[0]
    out = node.outputs[0]
    free = not (given.least or given.row_softmax)
    fits = free and takes_softmax(choice.inputs[0].shape[1], given.k, machine)
    same = [t.id for t in node.inputs] == [values.id] and node.placement == choice.placement
    alike = out.shape == values.shape and out.dtype == values.dtype and not node.after
    if not (fits and same and alike) or out.buffer.id in {t.buffer.id for t in choice.inputs}:
        return None
    attrs = structs.replace(given, softmax=True).to_node()
    return dataclasses.replace(choice, outputs=(out, *choice.outputs[1:]), attrs=attrs)


def _of_row(node: Node, makers: Sequence[Node], machine: Machine) -> Node | None:
    """A top-k of the softmax of a row, which chooses from the row itself; None if that is not
    possible.
    """
    softmax = makers[0]
    if (node.type, softmax.type) != ("topk", "softmax") or node.hints or softmax.hints:
        return None
    given, (x,) = node.read(TopKAttributes), softmax.inputs
    fits = not given.least and takes_row_softmax(x.shape[-1], given.k, machine)
    # The choice compares probabilities in fp32, and narrower types round some to equal ones.
    alike = x.shape == node.inputs[0].shape and x.dtype == node.inputs[0].dtype == fp32
    if not (fits and alike and softmax.placement == node.placement):
        return None
    if x.buffer.id in {t.buffer.id for t in node.outputs}:
        return None
    attrs = structs.replace(given, row_softmax=True).to_node()
    return node.fused("topk", (x,), node.outputs, attrs, (softmax, node), node.name)


def _given(node: Node) -> ExpertLinearAttributes | None:
    """The attributes of a product of chosen experts whose weight contains all experts; None for any
    other node.
    """
    given = node.read(ExpertLinearAttributes) if node.type == "expert_linear" else None
    return given if given is not None and not given.of and not node.hints else None


def _finished(node: Node, makers: Sequence[Node]) -> Node | None:
    """The product of chosen experts that an elementwise node reads, fused with this node; None if
    that is not possible.
    """
    plain = ExpertLinearAttributes()
    products = [n for n in makers if _given(n) == plain]
    out = node.outputs[0]
    if not is_elementwise(node) or node.hints or not 1 <= len(products) <= 2:
        return None
    first = products[0]
    x, weight, experts = first.inputs
    for product in products:
        same = product.inputs[0].id == x.id and product.inputs[2].id == experts.id
        alike = product.inputs[1].shape == weight.shape and product.outputs[0].shape == out.shape
        if not (same and alike and product.inputs[1].dtype == weight.dtype):
            return None
        if product.placement != node.placement:
            return None
    gathers = {n.outputs[0].id: n for n in makers if _takes_rows(n, experts, weight, node)}
    sums = [p.outputs[0] for p in products]
    tables, scores = [], []
    for tensor in dict.fromkeys(node.inputs):
        if tensor.id in gathers:
            tables.append(tensor)
        elif tensor.shape == (*experts.shape, 1) and tensor.dtype in FLOATS:
            scores.append(tensor)
        elif tensor.id not in {t.id for t in sums}:
            return None
    tree = expression_of(node)
    leaves = [t.id for t in (*sums, *tables, *scores)]
    fits = out.dtype in FLOATS and max(len(tables), len(scores)) <= MAX_EPILOGUE_TABLES
    if not fits or expression.places(tree) or any(t.dtype not in FLOATS for t in sums):
        return None
    given = ExpertLinearAttributes(
        weights=len(products),
        tables=len(tables),
        scores=len(scores),
        expr=expression.substitute(
            tree, [expression.leaf(leaves.index(t.id)) for t in node.inputs]
        ),
    )
    sources = [gathers[t.id].inputs[0] for t in tables]
    inputs = (*first.inputs, *(p.inputs[1] for p in products[1:]), *sources, *scores)
    return _fused(node, first, inputs, given, makers)


def _takes_rows(gather: Node, experts: Tensor, weight: Tensor, reader: Node) -> bool:
    """True if `gather` reads one row of a table for each chosen expert, as for a bias by expert.
    experts: the numbers of the chosen experts. weight: the experts' weights. reader: the node that
    reads the gathered rows.
    """
    if gather.type != "gather" or gather.placement != reader.placement or gather.hints:
        return False
    table, chosen = gather.inputs
    axis = gather.read(AxisAttributes).axis % len(table.shape)
    return axis == 0 and chosen.id == experts.id and table.shape == weight.shape[:2]


def _total(node: Node, makers: Sequence[Node]) -> Node | None:
    """A product of chosen experts, fused with the sum of the results of each row's experts; None if
    that is not possible.
    """
    given = _given(makers[0])
    if node.type != "reduce_sum" or given is None or given.total or node.hints:
        return None
    (product,) = makers
    shape, out = product.outputs[0].shape, node.outputs[0]
    how = node.read(ReduceAttributes)
    over = how.axis % 3 == 1 and how.term is None and shape[1] <= MAX_SLOTS
    flat = out.shape == (shape[0], shape[2]) and out.dtype in FLOATS
    if not over or not flat or node.inputs[0].id != product.outputs[0].id:
        return None
    if product.placement != node.placement:
        return None
    return _fused(node, product, product.inputs, structs.replace(given, total=True), makers)


def _added(node: Node, makers: Sequence[Node]) -> Node | None:
    """A product that already adds up the results of each row's experts, fused with the addition of
    a residual; None if that is not possible.
    """
    given = _given(makers[0])
    plain = is_elementwise(node) and len(node.inputs) == 2 and not node.hints
    if not plain or given is None or not given.total or given.residual:
        return None
    added = ["add", ["input", 0], ["input", 1]]
    product, out = makers[0], node.outputs[0]
    others = [t for t in node.inputs if t.id != product.outputs[0].id]
    if len(others) != 1 or not others[0].shape == out.shape == product.outputs[0].shape:
        return None
    residual = others[0]
    if residual.dtype != fp32 or out.dtype != fp32:
        return None
    if expression_of(node) not in (added, ["add", ["input", 1], ["input", 0]]):
        return None
    if product.placement != node.placement or residual.buffer.id == out.buffer.id:
        return None
    inputs = (*product.inputs, residual)
    return _fused(node, product, inputs, structs.replace(given, residual=True), makers)


def _fused(
    node: Node,
    product: Node,
    inputs: tuple[Tensor, ...],
    given: ExpertLinearAttributes,
    makers: Sequence[Node],
) -> Node | None:
    """The fused product. It takes the position of `node` in the graph and writes the result of
    `node`. None if it would overwrite an operand.
    """
    if node.outputs[0].buffer.id in {t.buffer.id for t in inputs}:
        return None
    members = (*makers, node)
    return node.fused("expert_linear", inputs, node.outputs, given.to_node(), members, product.name)
