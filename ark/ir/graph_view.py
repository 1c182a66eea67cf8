"""Makers, readers and writers in a graph: tables that passes ask and do not build themselves.

`Graph.view` gives them for the nodes that the graph has now, and makes them again when these have
changed. `WritesSoFar` is for passes that go through nodes in order: where each buffer was last
written.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from ark.ir.node import Node
from ark.ir.values import Tensor


def touched(node: Node) -> tuple[Tensor, ...]:
    """The tensors that a node reads, makes or comes after."""
    return (*node.inputs, *node.outputs, *node.after)


class GraphView:
    """Tables of some nodes in order, each made when it is first asked for."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)

    @cached_property
    def uses(self) -> Counter[int]:
        """How often nodes read or come after a tensor, by its id."""
        return Counter(t.id for n in self.nodes for t in (*n.inputs, *n.after))

    @cached_property
    def makers(self) -> Mapping[int, Node]:
        """The last node that has a tensor as an output, by its id."""
        return {t.id: n for n in self.nodes for t in n.outputs}

    @cached_property
    def readers(self) -> Mapping[int, list[Node]]:
        """The nodes that have a tensor as an input, by its id; one twice that has it twice."""
        nodes: dict[int, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for tensor in node.inputs:
                nodes[tensor.id].append(node)
        return nodes

    @cached_property
    def reads(self) -> Counter[int]:
        """How often nodes read or come after some of a buffer, by its id."""
        return Counter(t.buffer.id for n in self.nodes for t in (*n.inputs, *n.after))

    @cached_property
    def reading(self) -> Mapping[int, set[int]]:
        """The ids of the nodes that read or come after some of a buffer, by its id."""
        ids: dict[int, set[int]] = defaultdict(set)
        for node in self.nodes:
            for tensor in (*node.inputs, *node.after):
                ids[tensor.buffer.id].add(node.id)
        return ids

    @cached_property
    def touches(self) -> Counter[int]:
        """How often nodes touch a buffer, by its id."""
        return Counter(t.buffer.id for n in self.nodes for t in touched(n))

    @cached_property
    def touching(self) -> Mapping[int, set[int]]:
        """The ids of the nodes that touch a buffer, by its id."""
        ids: dict[int, set[int]] = defaultdict(set)
        for node in self.nodes:
            for tensor in touched(node):
                ids[tensor.buffer.id].add(node.id)
        return ids

    @cached_property
    def written(self) -> frozenset[int]:
        """The ids of the buffers of outputs."""
        return frozenset(t.buffer.id for n in self.nodes for t in n.outputs)

    @cached_property
    def writers(self) -> Mapping[int, list[Node]]:
        """The nodes with outputs in a buffer, by its id, in order."""
        nodes: dict[int, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for tensor in node.outputs:
                nodes[tensor.buffer.id].append(node)
        return nodes

    @cached_property
    def places(self) -> Mapping[int, int]:
        """Where a node stands, by its id."""
        return {n.id: place for place, n in enumerate(self.nodes)}

    @cached_property
    def working(self) -> GraphView:
        """The same of the nodes that make tasks."""
        return GraphView([n for n in self.nodes if not n.virtual])


class WritesSoFar:
    """Where each buffer was last written, of the nodes that a pass has gone through."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def add(self, place: int, node: Node) -> None:
        """The node at that place is done."""
        for tensor in node.outputs:
            self._last[tensor.buffer.id] = place

    def at(self, tensor: Tensor) -> int:
        """The place of the last write to the tensor's buffer; -1 where there is none."""
        return self._last.get(tensor.buffer.id, -1)

    def behind(self, place: int, tensors: Iterable[Tensor]) -> bool:
        """True where a buffer of one of these is written behind that place."""
        return any(self.at(t) > place for t in tensors)
