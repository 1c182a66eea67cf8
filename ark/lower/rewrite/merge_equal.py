"""Removes an elementwise op whose result an earlier op has already computed from the same inputs,
such as the attention mask that a model builds anew in each layer. Ops that read its result read the
earlier result instead. Listed in ark.lower.passes after the passes that fuse elementwise ops into
their readers, because a result with several readers cannot be fused.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.makers import only_makers
from ark.lower.rewrite.pack_weights import writes
from ark.lower.rewrite.views import whole
from ark.tasks.node_expressions import expression_of, is_elementwise


def merge_equal(graph: Graph, context: Context) -> Graph:
    """A copy of the graph without the elementwise nodes whose results exist already; the graph
    itself if there are none.
    """
    merger = _Merger(graph, context.kept)
    nodes = [node for n in graph.nodes if (node := merger.take(n)) is not None]
    return graph.with_nodes(nodes) if merger.replaced else graph


class _Merger:
    """Goes through the nodes in program order and removes repeated ops. replaced: the earlier
    result, by the buffer of the result that it replaces.
    """

    def __init__(self, graph: Graph, kept: frozenset[int]) -> None:
        self.graph, self.kept = graph, kept
        self.makers = only_makers(graph)
        self.unfit = {t.buffer.id for n in graph.nodes if n.virtual for t in (*n.inputs, *n.after)}
        self.writes: Counter[int] = Counter()  # by buffer, so far
        self.results: dict[tuple[object, ...], Tensor] = {}
        self.replaced: dict[int, Tensor] = {}
        # The key is the id, place and shape of the tensor that a view replaces. The id alone is not
        # enough, because a tensor that ops read in several shapes has one id.
        self.views: dict[tuple[object, ...], Tensor] = {}

    def take(self, node: Node) -> Node | None:
        """The next node of the program, with inputs that repeat an earlier result replaced by that
        result. None if the node's own result repeats an earlier one, so that the node is not
        needed.
        """
        inputs = tuple(self._read(t) for t in node.inputs)
        after = tuple(self._read(t) for t in node.after)
        if (inputs, after) != (node.inputs, node.after):
            node = dataclasses.replace(node, inputs=inputs, after=after)
        if self._mergeable(node):
            out = node.outputs[0]
            key = (
                node.placement,
                repr(expression_of(node)),
                (out.dtype, out.shape, out.extents),
                *(self._contents(t) for t in inputs),
            )
            earlier = self.results.setdefault(key, out)
            if earlier is not out:
                self.replaced[out.buffer.id] = earlier
                return None
        self.writes.update(writes(node))
        return node

    def _mergeable(self, node: Node) -> bool:
        """True for an elementwise node whose result is written once and read only in the graph."""
        if node.virtual or node.after or not is_elementwise(node) or len(node.outputs) != 1:
            return False
        out = node.outputs[0]
        alone = self.makers.get(out.buffer.id)
        free = node.hints is None and node.context is None and node.processors is None
        unseen = out.buffer.id not in self.kept and out.buffer.id not in self.unfit
        return free and unseen and whole(out) and alone is not None and alone.id == node.id

    def _contents(self, tensor: Tensor) -> tuple[object, ...]:
        """A key for the contents of a tensor at this point of the program: tensors with equal keys
        have the same elements in the same shape.
        """
        return (tensor.buffer.id, self.writes[tensor.buffer.id], tensor.dtype, *_place(tensor))

    def _read(self, tensor: Tensor) -> Tensor:
        """Returns the tensor itself. If an earlier op computed the same elements, returns a view of
        the earlier op's result instead.
        """
        earlier = self.replaced.get(tensor.buffer.id)
        if earlier is None:
            return tensor
        key = (tensor.id, *_place(tensor))
        if key not in self.views:
            self.views[key] = self.graph.tensor_like(tensor, earlier.buffer, tensor.name)
        return self.views[key]


def _place(tensor: Tensor) -> tuple[object, ...]:
    """The tensor's shape, and its place in its buffer."""
    return (tensor.shape, tensor.extents, tensor.offsets, tensor.padded)
