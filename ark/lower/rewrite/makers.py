"""Finds the node that computes a tensor. Passes that recognise a pattern of several nodes use it to
go backwards from the pattern's last node.

Called by fuse_attention, fuse_rmsnorm, fuse_rotary, keep_row_order, compose_remaps, merge_equal,
row_regions and cancel_transposes in ark.lower.rewrite.
"""

from __future__ import annotations

from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.fuse_chains import read_once
from ark.lower.rewrite.views import same_elements


def only_makers(graph: Graph) -> dict[int, Node]:
    """For the id of each activation buffer that a single node writes, this node."""
    makers: dict[int, Node] = {}
    for buffer, nodes in graph.view.writers.items():
        first = next(t for t in nodes[0].outputs if t.buffer.id == buffer)
        if len(nodes) == 1 and not nodes[0].virtual and first.buffer.arena == "activation":
            makers[buffer] = nodes[0]
    return makers


def replaceable(node: Node) -> bool:
    """True if other nodes may take the place of the node: it has one output, runs as tasks, has no
    hints of the user and need not wait for certain nodes.
    """
    return len(node.outputs) == 1 and node.hints is None and not node.after and not node.virtual


def without(graph: Graph, taken: set[int], idle: set[int], kept: frozenset[int]) -> Graph:
    """The graph without the nodes whose ids are in `taken`. Nodes whose ids are in `idle` are
    removed too, unless a remaining node reads their results. kept: ids of buffers that are read
    outside of the graph.
    """
    left = graph.with_nodes(n for n in graph.nodes if n.id not in taken)
    reads = left.view.reads

    def unread(node: Node) -> bool:
        buffers = [t.buffer for t in node.outputs]
        return all(
            b.arena == "activation" and b.id not in kept and not reads[b.id] for b in buffers
        )

    return left.with_nodes(n for n in left.nodes if n.id not in idle or not unread(n))


class Pattern:
    """Access to a graph's nodes for matching a pattern backwards from its last node."""

    def __init__(self, graph: Graph, kept: frozenset[int]) -> None:
        self.view, self.private = graph.view, read_once(graph, kept, repeated_inputs=True)
        self.makers = only_makers(graph)

    def maker(self, tensor: Tensor, reader: Node, kind: str = "") -> Node | None:
        """The node whose only result is this tensor, if no other node than `reader` reads it; None
        otherwise. kind: the type that the node must have; "" for any type.
        """
        node = self.makers.get(tensor.buffer.id)
        if node is None or len(node.outputs) != 1 or node.placement != reader.placement:
            return None
        fits = not node.after and self.private(node.outputs[0]) and kind in ("", node.type)
        return node if fits and same_elements(tensor, node.outputs[0]) else None
