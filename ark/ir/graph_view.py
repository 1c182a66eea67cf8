"""Lookup tables of a graph: which nodes write and read its tensors and buffers.

`Graph.view` returns the tables of the present nodes and computes them again after the nodes have
changed, so passes need not build tables. `WritesSoFar` is for passes that process nodes in order:
it records where each buffer was last written.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from ark.ir.node import Node
from ark.ir.values import Tensor


def touched(node: Node) -> tuple[Tensor, ...]:
    """The tensors that a node reads or writes, or whose writers must run before the node."""
    return (*node.inputs, *node.outputs, *node.after)


class GraphView:
    """Lookup tables of a sequence of nodes, each computed at its first use."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)

    @cached_property
    def types(self) -> frozenset[str]:
        """The types of the nodes."""
        return frozenset(n.type for n in self.nodes)

    @cached_property
    def uses(self) -> Counter[int]:
        """For each tensor id: how often nodes list the tensor as an input or in `after` (tensors
        whose writers must run before the node).
        """
        return Counter(t.id for n in self.nodes for t in (*n.inputs, *n.after))

    @cached_property
    def makers(self) -> Mapping[int, Node]:
        """For each tensor id: the last node that has it as an output."""
        return {t.id: n for n in self.nodes for t in n.outputs}

    @cached_property
    def readers(self) -> Mapping[int, list[Node]]:
        """For each tensor id: the nodes that have it as an input; a node is listed once per such
        input.
        """
        nodes: dict[int, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for tensor in node.inputs:
                nodes[tensor.id].append(node)
        return nodes

    @cached_property
    def reads(self) -> Counter[int]:
        """For each buffer id: how often nodes list a tensor on this buffer as an input or in
        `after`.
        """
        return Counter(t.buffer.id for n in self.nodes for t in (*n.inputs, *n.after))

    @cached_property
    def reading(self) -> Mapping[int, set[int]]:
        """For each buffer id: the ids of the nodes that list a tensor on this buffer as an input or
        in `after`.
        """
        ids: dict[int, set[int]] = defaultdict(set)
        for node in self.nodes:
            for tensor in (*node.inputs, *node.after):
                ids[tensor.buffer.id].add(node.id)
        return ids

    @cached_property
    def touches(self) -> Counter[int]:
        """For each buffer id: how often nodes list a tensor on this buffer as an input, as an
        output or in `after`.
        """
        return Counter(t.buffer.id for n in self.nodes for t in touched(n))

    @cached_property
    def touching(self) -> Mapping[int, set[int]]:
        """For each buffer id: the ids of the nodes that list a tensor on this buffer as an input,
        as an output or in `after`.
        """
        ids: dict[int, set[int]] = defaultdict(set)
        for node in self.nodes:
            for tensor in touched(node):
                ids[tensor.buffer.id].add(node.id)
        return ids

    @cached_property
    def written(self) -> frozenset[int]:
        """The ids of the buffers that nodes write."""
        return frozenset(t.buffer.id for n in self.nodes for t in n.outputs)

    @cached_property
    def writers(self) -> Mapping[int, list[Node]]:
        """For each buffer id: the nodes with outputs on it, in program order."""
        nodes: dict[int, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for tensor in node.outputs:
                nodes[tensor.buffer.id].append(node)
        return nodes

    @cached_property
    def places(self) -> Mapping[int, int]:
        """For each node id: its position among the nodes."""
        return {n.id: place for place, n in enumerate(self.nodes)}

    def steady(self, tensors: Iterable[Tensor], first: Node, last: Node, own: bool = False) -> bool:
        """True if nothing writes the memory of these tensors between the nodes `first` and `last`,
        so that `last` can read what `first` reads. own: True to count also what `last` writes.
        """
        begin, end = self.places[first.id], self.places[last.id] + own
        writers = (n for t in tensors for n in self.writers.get(t.buffer.id, ()))
        return not any(begin < self.places[n.id] < end for n in writers)

    @cached_property
    def working(self) -> GraphView:
        """The lookup tables without virtual nodes, which only name or view memory and make no
        tasks.
        """
        return GraphView([n for n in self.nodes if not n.virtual])


class WritesSoFar:
    """For each buffer, the position of the last node that wrote it, among the nodes that a pass has
    processed so far.
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def add(self, place: int, node: Node) -> None:
        """Records the outputs of the node at position `place`."""
        for tensor in node.outputs:
            self._last[tensor.buffer.id] = place

    def at(self, tensor: Tensor) -> int:
        """The position of the last write to the tensor's buffer; -1 if there was none."""
        return self._last.get(tensor.buffer.id, -1)

    def behind(self, place: int, tensors: Iterable[Tensor]) -> bool:
        """True if the buffer of one of these tensors was written after position `place`."""
        return any(self.at(t) > place for t in tensors)
