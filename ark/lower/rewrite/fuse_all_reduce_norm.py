"""Fuses an all-reduce, its optional residual, and the rmsnorm that reads the result: the task that
adds a row over ranks also normalises it. The sum itself is still written, because other ops may
read it.

Listed in ark.lower.passes after the passes that fuse all-reduces into decoding layers (fuse_linear,
inline_all_reduce) or into products (overlap_collectives), so it handles the remaining all-reduces.
"""

from __future__ import annotations

import dataclasses

from ark.ir.attributes import NormAttributes, SumNormAttributes
from ark.ir.dtype import FLOATS
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.tasks.combine import ACCESS_BYTES

ALL_REDUCE_NORM = "all_reduce_norm"


def fuse_all_reduce_norm(graph: Graph, context: Context) -> Graph:
    """A copy of the graph with each all-reduce and the rmsnorm of its result fused into one
    node.
    """
    if graph.world_size == 1:
        return graph
    nodes: list[Node | None] = list(graph.nodes)
    sums: dict[int, int] = {}  # by buffer: index of the sum last written to it
    for place, node in enumerate(graph.nodes):
        if node.virtual:
            continue
        at = sums.get(node.inputs[0].buffer.id) if node.type == "rmsnorm" else None
        total = nodes[at] if at is not None else None
        if at is not None and total is not None and _fits(graph.nodes[at + 1 : place], total, node):
            nodes[at], nodes[place] = _joined(total, node), None
        for tensor in node.outputs:
            sums.pop(tensor.buffer.id, None)
        if node.type == "all_reduce":
            sums[node.outputs[0].buffer.id] = place
    return graph.with_nodes(n for n in nodes if n is not None)


def _fits(between: list[Node], total: Node, norm: Node) -> bool:
    """True if the norm can be computed together with the all-reduce `total`: the nodes between them
    neither access the norm's result nor write the norm's weight.
    """
    out, normed = total.outputs[0], norm.outputs[0]
    read, weight = norm.inputs
    touched = {
        t.buffer.id for n in between if not n.virtual for t in (*n.inputs, *n.outputs, *n.after)
    }
    written = {t.buffer.id for n in between if not n.virtual for t in n.outputs}
    return (
        total.type == "all_reduce"
        and total.placement == norm.placement
        and total.hints is None
        and total.context == norm.context
        and out.dtype in FLOATS
        and all(t.dense for t in (out, read, normed, weight))
        and all(_on_chunks(t) for t in (out, read, normed))
        and (read.nbytes, read.offsets) == (out.nbytes, out.offsets)
        and read.shape[-1] * out.dtype.itemsize % ACCESS_BYTES == 0
        and normed.buffer.id not in touched
        and weight.buffer.id not in written
        and not norm.after
        and normed.buffer.id not in {t.buffer.id for t in (*total.inputs, out, weight)}
    )


def _on_chunks(tensor: Tensor) -> bool:
    start = sum(o * s for o, s in zip(tensor.offsets, tensor.strides, strict=True))
    return start * tensor.dtype.itemsize % ACCESS_BYTES == 0


def _joined(total: Node, norm: Node) -> Node:
    columns = norm.inputs[0].shape[-1]
    attrs = SumNormAttributes(eps=norm.read(NormAttributes).eps, columns=columns).to_node()
    return dataclasses.replace(
        total,
        type=ALL_REDUCE_NORM,
        name=f"{total.name}.{norm.name}",
        inputs=(*total.inputs, norm.inputs[1]),
        outputs=(*total.outputs, *norm.outputs),
        attrs=attrs,
    )
