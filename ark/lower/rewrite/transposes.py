"""Products that read a transposed matrix read what was transposed instead, the other way round.

Front ends write x W^T as a transpose and a product; the transpose is an op of its own only where
somebody else reads it. Called by ark.lower.prepare.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.boxed import FLAGS


def read_transposed(graph: Graph, kept: frozenset[int]) -> Graph:
    """A copy of the graph with such products. kept: ids of buffers that somebody else reads."""
    transposed: dict[int, tuple[int, Node]] = {}  # by tensor: place and node
    written: dict[int, int] = {}  # by buffer: place of the last write
    taken: set[int] = set()  # nodes whose result a product no longer reads
    nodes: list[Node] = []
    for place, node in enumerate(graph.nodes):
        if _is_transpose(node):
            transposed[node.outputs[0].id] = (place, node)
        elif node.type == "matmul" and node.hints is None:
            for side in (0, 1):
                at, before = transposed.get(node.inputs[side].id, (-1, None))
                if before is None or node.inputs[side] != before.outputs[0]:
                    continue
                source = before.inputs[0]
                if before.phase == node.phase and written.get(source.buffer.id, -1) <= at:
                    node = reading_turned(node, side, source)
                    taken.add(before.id)
        for tensor in node.outputs:
            written[tensor.buffer.id] = place
        nodes.append(node)
    read = Counter(t.buffer.id for n in nodes for t in (*n.inputs, *n.after))
    return graph.with_nodes(n for n in nodes if n.id not in taken or not _unread(n, read, kept))


def _is_transpose(node: Node) -> bool:
    """Does it swap the last two dimensions, and no others?"""
    if node.type != "transpose" or node.hints is not None or node.outputs[0].dtype.packed:
        return False
    order = list(node.attrs["perm"])
    count = len(order)
    return count >= 2 and order == [*range(count - 2), count - 1, count - 2]


def reading_turned(product: Node, side: int, source: Tensor) -> Node:
    """The product, which reads as that side what is its transpose."""
    inputs = list(product.inputs)
    inputs[side] = source
    attrs = {**product.attrs, FLAGS[side]: not product.attrs[FLAGS[side]]}
    return dataclasses.replace(product, inputs=tuple(inputs), attrs=attrs)


def _unread(node: Node, read: Counter[int], kept: frozenset[int]) -> bool:
    buffer = node.outputs[0].buffer
    return buffer.arena == "activation" and buffer.id not in kept and not read[buffer.id]
