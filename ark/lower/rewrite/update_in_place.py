"""Lets a scatter update its input in place. In the gradient of an embedding, rows are added to
zeros. The op that writes the zeros then writes them to the memory of the scatter's result, so that
a tensor of the size of the table is not copied. Listed in ark.lower.passes.
"""

from __future__ import annotations

import dataclasses

from ark.ir.attributes import ScatterAttributes
from ark.ir.graph import Graph, Node
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.makers import only_makers
from ark.lower.rewrite.views import whole
from ark.tasks.node_expressions import is_elementwise


def update_in_place(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which scatters update what an elementwise node has computed for them
    alone.
    """
    makers, changed = only_makers(graph), dict[int, Node]()
    for node in graph.nodes:
        if node.type != "scatter_elements":
            continue
        maker = makers.get(node.inputs[0].buffer.id)
        if maker is None or not _fits(graph, maker, node, context.kept):
            continue
        shared = dataclasses.replace(node.inputs[0], buffer=node.outputs[0].buffer)
        changed[maker.id] = dataclasses.replace(changed.get(maker.id, maker), outputs=(shared,))
        inputs = (shared, *changed.get(node.id, node).inputs[1:])
        changed[node.id] = dataclasses.replace(node, inputs=inputs)
    return graph.with_nodes(changed.get(n.id, n) for n in graph.nodes) if changed else graph


def _fits(graph: Graph, maker: Node, node: Node, kept: frozenset[int]) -> bool:
    """True if the scatter `node` may update what the node `maker` has computed. A scatter along
    the last dimension may copy and update rows in one step, which is faster.
    """
    source, out, touches = node.inputs[0], node.outputs[0], graph.view.touches
    places = graph.view.places
    return (
        is_elementwise(maker)
        and maker.hints is None
        and not any(t.buffer.id == source.buffer.id for t in (*node.inputs[1:], *node.after))
        and maker.placement == node.placement
        and (touches[source.buffer.id], source.buffer.id in kept) == (2, False)
        and out.buffer.id != source.buffer.id
        and (out.buffer.arena, out.buffer.id in kept) == ("activation", False)
        and places[node.id] == min(places[n] for n in graph.view.touching[out.buffer.id])
        and all(whole(t) for t in (source, out, *maker.outputs))
        and (source.shape, source.dtype) == (out.shape, out.dtype)
        and maker.outputs[0].shape == source.shape
        and node.read(ScatterAttributes).axis < len(out.shape) - 1
    )
