"""Fuses two ops into one: the op that adds the partial sums of a product whose inner dimension k
was divided into parts (split-k), and the rmsnorm of its result. The task that adds the parts of a
row also normalises the row. The sum may include a residual. The sum itself is still written,
because other ops may read it. Listed in ark.lower.passes.
"""

from __future__ import annotations

import dataclasses

from ark.ir.attributes import AddPartsAttributes
from ark.ir.dtype import fp32
from ark.ir.graph import Graph, Node
from ark.ir.values import dense_view
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.cut_products import sum_of_parts
from ark.plan.types import MAX_OPERANDS
from ark.tasks import expression
from ark.tasks.combine import ACCESS_BYTES


def fuse_parts_norm(graph: Graph, context: Context) -> Graph:
    """A copy of the graph with sums and norms fused; the graph itself if there are none."""
    nodes: list[Node] = []
    last = -1  # index of the last node that has tasks
    for node in graph.nodes:
        if node.type == "rmsnorm" and last >= 0 and _fits(nodes[last], node):
            total = nodes.pop(last)
            node = _joined(total, node)
        if not node.virtual:
            last = len(nodes)
        nodes.append(node)
    return graph if len(nodes) == len(graph.nodes) else graph.with_nodes(nodes)


def _fits(total: Node, norm: Node) -> bool:
    """True if `norm` normalises the rows of the sum `total`, and the partial sums, the residual and
    the sum are fp32.
    """
    if total.type != "add_parts":
        return False
    (parts, *others), out = total.inputs, total.outputs[0]
    (source, weight), normed = norm.inputs, norm.outputs[0]
    count = parts.shape[0] + len(others)
    plain = sum_of_parts(count)
    beside = ["add", expression.leaf(count - 1), sum_of_parts(count - 1)]
    memory = [t.buffer.id for t in (parts, *others, weight, out, normed)]
    return (
        total.read(AddPartsAttributes).expr in (plain, beside)
        and (total.placement, total.context) == (norm.placement, norm.context)
        and norm.hints is None
        and not (total.after or norm.after)
        and count + 3 <= MAX_OPERANDS
        and all(t.dtype == fp32 for t in (parts, *others, out))
        and all(t.dense and t.elements == out.elements for t in others)
        and all(t.dense for t in (out, source, weight, normed))
        and out.elements == source.elements
        and out.buffer.id == source.buffer.id
        and dense_view(out, (out.elements,)) == dense_view(source, (out.elements,))
        and source.shape[-1] == out.shape[-1] == weight.shape[0]
        and out.shape[-1] * fp32.itemsize % ACCESS_BYTES == 0
        and memory[-1] not in memory[:-1]
        and memory[-2] not in memory[:-2]
    )


def _joined(total: Node, norm: Node) -> Node:
    return dataclasses.replace(
        norm,
        type="add_parts_norm",
        inputs=(*total.inputs, norm.inputs[1]),
        outputs=(*total.outputs, *norm.outputs),
    )
