"""Products that read a transposed matrix read what was transposed instead, the other way round.

Front ends write x W^T as a transpose and a product; the transpose is an op of its own only where
somebody else reads it. Matrix units that want k side by side have what lies otherwise transposed in
memory, once the kernel's variant is known. Called by ark.lower.prepare.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.machine import Machine

FLAGS = ("transpose_a", "transpose_b")


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
                    node = _reading(node, side, source)
                    taken.add(before.id)
        for tensor in node.outputs:
            written[tensor.buffer.id] = place
        nodes.append(node)
    read = Counter(t.buffer.id for n in nodes for t in (*n.inputs, *n.after))
    return graph.with_nodes(n for n in nodes if n.id not in taken or not _unread(n, read, kept))


def wants_along(node: Node) -> bool:
    """Is it a product of types of which matrix units multiply k that lies side by side alone?"""
    return node.inputs[0].dtype.bits == 8 or bool(node.attrs.get("tf32"))


def lay_along(graph: Graph, machine: Machine) -> Graph:
    """A copy of the graph in which such products, under the variant for matrix units, have k side
    by side on both sides.
    """
    if machine.variant.name != "matrix":
        return graph
    number = max((n.id for n in graph.nodes), default=0)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.type == "matmul" and wants_along(node):
            for side, wanted in ((0, False), (1, True)):
                if bool(node.attrs[FLAGS[side]]) == wanted:
                    continue
                number += 1
                turned = _turn(graph, node, side, number)
                nodes.append(turned)
                node = _reading(node, side, turned.outputs[0])
        nodes.append(node)
    return graph.with_nodes(nodes)


def _turn(graph: Graph, product: Node, side: int, number: int) -> Node:
    """What transposes one side of a product, in its place."""
    source = product.inputs[side]
    rank = len(source.shape)
    order = [*range(rank - 2), rank - 1, rank - 2]
    name = f"{product.name}.turned"
    out = graph.tensor([source.shape[d] for d in order], source.dtype, name=name)
    return dataclasses.replace(
        product,
        id=number,
        type="transpose",
        name=name,
        inputs=(source,),
        outputs=(out,),
        attrs={"perm": order},
    )


def _is_transpose(node: Node) -> bool:
    """Does it swap the last two dimensions, and no others?"""
    if node.type != "transpose" or node.hints is not None or node.outputs[0].dtype.packed:
        return False
    order = list(node.attrs["perm"])
    count = len(order)
    return count >= 2 and order == [*range(count - 2), count - 1, count - 2]


def _reading(product: Node, side: int, source: Tensor) -> Node:
    inputs = list(product.inputs)
    inputs[side] = source
    attrs = {**product.attrs, FLAGS[side]: not product.attrs[FLAGS[side]]}
    return dataclasses.replace(product, inputs=tuple(inputs), attrs=attrs)


def _unread(node: Node, read: Counter[int], kept: frozenset[int]) -> bool:
    buffer = node.outputs[0].buffer
    return buffer.arena == "activation" and buffer.id not in kept and not read[buffer.id]
