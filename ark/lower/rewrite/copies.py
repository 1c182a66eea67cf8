"""Removes transposes and copies that a rewrite has made unnecessary.

Called by fuse_attention and row_regions in ark.lower.rewrite.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.strided import COPIES, Writes, items_of, origins, place_of
from ark.lower.rewrite.views import whole
from ark.tasks.node_expressions import is_elementwise


def read_in_place(graph: Graph, kept: frozenset[int]) -> Graph:
    """The graph in which ops read the source of a transpose instead of its result, if the source
    already has the elements in the same order in memory (for example, if only dimensions of size 1
    change places). The transposes themselves are not removed.
    """
    last: dict[int, tuple[int, Node]] = {}
    moved: dict[int, Tensor] = {}  # by buffer: a tensor in the buffer to read instead
    nodes: list[Node] = []
    for place, node in enumerate(graph.nodes):
        instead = tuple(_moved(t, moved) for t in node.inputs)
        if instead != node.inputs:
            node = dataclasses.replace(node, inputs=instead)
        nodes.append(node)
        for tensor in node.outputs:
            moved.pop(tensor.buffer.id, None)
            last[tensor.buffer.id] = (place, node)
        if node.type not in COPIES or node.outputs[0].buffer.id in kept:
            continue
        out = node.outputs[0]
        everything = place_of(out, (range(len(out.shape)),))
        for origin in list(origins(everything, Writes(last), node.phase))[:0:-1]:
            items = items_of(dataclasses.replace(out, buffer=origin.buffer))
            dense = origin.axes == (((out.elements, 1),),) and origin.start == 0
            unwritten = not _written_later(graph, origin.buffer.id, place)
            if dense and items == out.elements and unwritten and whole(out):
                moved[out.buffer.id] = dataclasses.replace(out, buffer=origin.buffer)
                break
    return graph.with_nodes(nodes)


def _written_later(graph: Graph, buffer: int, place: int) -> bool:
    return any(t.buffer.id == buffer for n in graph.nodes[place + 1 :] for t in n.outputs)


def _moved(tensor: Tensor, moved: dict[int, Tensor]) -> Tensor:
    target = moved.get(tensor.buffer.id)
    return tensor if target is None else dataclasses.replace(tensor, buffer=target.buffer)


def without_unread(graph: Graph, kept: frozenset[int], known: frozenset[int]) -> Graph:
    """The graph without the ops whose results are not read. Only elementwise ops, copies and the
    ops in `known` (ids of ops that depend on constants only) are removed.
    """
    left: list[Node] = []
    read: Counter[int] = Counter()
    for node in reversed(graph.nodes):
        buffers = [t.buffer for t in node.outputs]
        idle = all(b.arena == "activation" and b.id not in kept and not read[b.id] for b in buffers)
        plain = is_elementwise(node) or node.type in COPIES or node.id in known
        if not node.virtual and idle and plain:
            continue
        read.update(t.buffer.id for t in (*node.inputs, *node.after))
        left.append(node)
    return graph.with_nodes(left[::-1])
