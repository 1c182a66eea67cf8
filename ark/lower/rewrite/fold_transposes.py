"""Removes transposes whose result only products and reductions read: these ops read the transpose's
source through a view with exchanged dimensions instead.

For example, front ends write x W^T as a transpose and a product. A transpose remains if another op
reads its result. Listed in ark.lower.passes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from msgspec import structs

from ark.ir.attributes import MatmulAttributes, ReduceAttributes, TransposeAttributes
from ark.ir.graph import Graph, Node
from ark.ir.graph_view import GraphView, WritesSoFar
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.views import in_shape, same_elements, whole


def fold_transposes(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which products and reductions read the sources of transposes."""
    kept = context.kept
    transposed: dict[int, tuple[int, Node]] = {}  # by buffer: index and node
    written = WritesSoFar()
    taken: set[int] = set()  # nodes whose result an op no longer reads
    nodes: list[Node] = []
    for place, node in enumerate(graph.nodes):
        if node.type == "transpose" and node.hints is None:
            transposed[node.outputs[0].buffer.id] = (place, node)
        elif (node.type == "matmul" or node.type.startswith("reduce_")) and node.hints is None:
            for side, read in enumerate(node.inputs[:2]):
                at, before = transposed.get(read.buffer.id, (-1, None))
                if before is None or written.at(read) != at:
                    continue
                copied, source = before.outputs[0], before.inputs[0]
                if before.phase == node.phase and not written.behind(at, [source]):
                    if dataclasses.replace(read, id=copied.id) == copied:
                        turned = _reading(node, side, before)
                    else:
                        turned = _reading_batches(node, side, before)
                    taken.update(() if turned is None else (before.id,))
                    node = turned or node
        written.add(place, node)
        nodes.append(node)
    reads = GraphView(nodes).reads
    return graph.with_nodes(n for n in nodes if n.id not in taken or not _unread(n, reads, kept))


def _reading(node: Node, side: int, transpose: Node) -> Node | None:
    """A copy of `node` that reads the source of `transpose` instead of its result; None if the op
    does not support this. side: the index of the input that is the transpose's result.
    """
    order, source = transpose.read(TransposeAttributes).perm, transpose.inputs[0]
    if node.type == "matmul":
        turned = [*range(len(order) - 2), *range(len(order) - 1, len(order) - 3, -1)]
        plain = len(order) > 1 and order == turned and not source.dtype.packed
        return reading_turned(node, side, source) if plain else None
    axis, out = order.pop(node.read(ReduceAttributes).axis), node.outputs[0]
    if order != sorted(order):
        return None
    if node.read(ReduceAttributes).keepdims:
        shape = [1 if d == axis else n for d, n in enumerate(source.shape)]
        seen = in_shape(out, shape)
        if seen is None:
            return None
        out = seen
    given = structs.replace(node.read(ReduceAttributes), axis=axis)
    return dataclasses.replace(node, inputs=(source,), outputs=(out,)).with_attributes(given)


def _reading_batches(node: Node, side: int, transpose: Node) -> Node | None:
    """Like `_reading`, for a product that reads the transpose's result in another shape: with other
    dimensions of the batch, or without dimensions of size 1.
    """
    read, copied, source = node.inputs[side], transpose.outputs[0], transpose.inputs[0]
    if node.type != "matmul" or not same_elements(read, copied) or not whole(source):
        return None
    if len(read.shape) < 2 or source.dtype.packed:
        return None
    perm = transpose.read(TransposeAttributes).perm
    order = [d for d in perm if source.shape[d] > 1]
    matrix = tuple(source.shape[d] for d in order[-2:])
    *batch, rows, columns = read.shape
    if matrix != (rows, columns) or [*order[:-2], *order[:-3:-1]] != sorted(order):
        return None
    seen = in_shape(source, (*batch, columns, rows))
    return None if seen is None else reading_turned(node, side, seen)


def reading_turned(product: Node, side: int, source: Tensor) -> Node:
    """A copy of the product that reads `source` as its operand `side` (0 or 1) and treats this
    operand as transposed.
    """
    inputs = list(product.inputs)
    inputs[side] = source
    given = product.read(MatmulAttributes)
    a, b = (turned != (side == i) for i, turned in enumerate(given.transposes))
    turned = structs.replace(given, transpose_a=a, transpose_b=b)
    return dataclasses.replace(product, inputs=tuple(inputs)).with_attributes(turned)


def _unread(node: Node, read: Counter[int], kept: frozenset[int]) -> bool:
    buffer = node.outputs[0].buffer
    return buffer.arena == "activation" and buffer.id not in kept and not read[buffer.id]
