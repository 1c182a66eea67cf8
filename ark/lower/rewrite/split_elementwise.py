"""Splits an elementwise op into one op for each part of its result that is read separately, such as
the four gates of an LSTM cell. Each new op has the shape of the ops that read its result, so that
fuse_chains and fuse_regions can fuse them. Listed in ark.lower.passes before these two.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable

from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor, overlap
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.views import whole
from ark.tasks import expression
from ark.tasks.node_expressions import expression_of, is_elementwise

MAX_RESULT_BOXES = 8  # boxes per result

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, shape


def split_elementwise(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which an elementwise op is split into several, one for each part of
    its result that is read separately.
    """
    kept = context.kept
    demanded = _demanded(graph, kept)
    if not demanded:
        return graph
    parts = _Parts(graph, demanded)
    for node in graph.nodes:
        parts.take(node)
    numbered = (dataclasses.replace(n, id=i) for i, n in enumerate(parts.nodes))
    return graph.with_nodes(numbered)


def _demanded(graph: Graph, kept: frozenset[int]) -> dict[int, set[Box]]:
    """For each result that should be computed in parts, by buffer id: the boxes (rectangular parts)
    that its readers read.
    """
    written: dict[int, list[int]] = defaultdict(list)
    unfit = set(kept)
    for place, node in enumerate(graph.nodes):
        for tensor in node.outputs:
            written[tensor.buffer.id].append(place)
        unfit |= {t.buffer.id for t in node.after}
    demanded: dict[int, set[Box]] = {}
    read: dict[int, list[Tensor]] = defaultdict(list)
    for place in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[place]
        out = node.outputs[0] if node.outputs else None
        if out is not None and out.buffer.id not in unfit and _divisible(node):
            boxes = {(t.offsets, t.shape): t for t in read[out.buffer.id]}
            steady = written[out.buffer.id] == [place] and all(
                max(written[t.buffer.id], default=-1) < place for t in node.inputs
            )
            if steady and _apart(out, list(boxes.values())):
                demanded[out.buffer.id] = set(boxes)
                for tensor, box in itertools.product(node.inputs, boxes):
                    read[tensor.buffer.id].append(_part(tensor, out, box))
                continue
        joins = is_elementwise(node) and node.hints is None
        for tensor in node.inputs:
            read[tensor.buffer.id].append(tensor)
            if not joins:
                unfit.add(tensor.buffer.id)
    return demanded


def _divisible(node: Node) -> bool:
    """True for an elementwise op that can be computed in parts: its result fills a buffer, and its
    expression does not depend on the indices of elements.
    """
    out = node.outputs[0]
    return (
        is_elementwise(node)
        and node.hints is None
        and not node.after
        and out.buffer.arena == "activation"
        and not any(t.dtype.packed for t in (*node.inputs, out))
        and whole(out)
        and not expression.places(expression_of(node))
    )


def _apart(out: Tensor, boxes: list[Tensor]) -> bool:
    """True if the boxes are two or more disjoint parts of the result, at most MAX_RESULT_BOXES."""
    if not 1 < len(boxes) <= MAX_RESULT_BOXES:
        return False
    return all(
        t.extents == out.extents and t.dtype == out.dtype and t.padded == t.shape for t in boxes
    ) and not any(overlap(a, b) for a, b in itertools.combinations(boxes, 2))


def _part(tensor: Tensor, out: Tensor, box: Box) -> Tensor:
    """The part of an op's input that is needed to compute a box (a rectangular part) of its output
    `out`. The input broadcasts to `out`.
    """
    more = len(out.shape) - len(tensor.shape)
    offsets, shape = list(tensor.offsets), list(tensor.shape)
    for d, size in enumerate(tensor.shape):
        if size == out.shape[more + d]:
            offsets[d] += box[0][more + d] - out.offsets[more + d]
            shape[d] = box[1][more + d]
    return dataclasses.replace(
        tensor, shape=tuple(shape), offsets=tuple(offsets), padded=tuple(shape)
    )


class _Parts:
    """Builds the nodes of the new graph in order. For each part of a split result, an op that
    computes the part is added just before the first op that reads it.
    """

    def __init__(self, graph: Graph, demanded: dict[int, set[Box]]) -> None:
        self.graph, self.demanded = graph, demanded
        self.nodes: list[Node] = []
        self.waiting: dict[int, Node] = {}  # by buffer
        self.parts: dict[tuple[int, Box], Tensor] = {}
        self.views: dict[tuple[int, Box], Tensor] = {}

    def take(self, node: Node) -> None:
        if node.outputs and node.outputs[0].buffer.id in self.demanded:
            self.waiting[node.outputs[0].buffer.id] = node
        else:
            self.nodes.append(dataclasses.replace(node, inputs=self._read(node.inputs)))

    def _read(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """The given inputs, in which each part of a split result is replaced by the tensor of that
        part. Adds the ops for parts that are not computed yet.
        """
        return tuple(self._part_tensor(t) if t.buffer.id in self.waiting else t for t in tensors)

    def _part_tensor(self, tensor: Tensor) -> Tensor:
        box = tensor.offsets, tensor.shape
        part = self.parts.get((tensor.buffer.id, box))
        if part is None:
            node = self.waiting[tensor.buffer.id]
            inputs = self._read(_part(t, node.outputs[0], box) for t in node.inputs)
            part = self.graph.tensor(tensor.shape, tensor.dtype)
            self.parts[tensor.buffer.id, box] = part
            named = tuple(self._named(t) for t in inputs)
            self.nodes.append(dataclasses.replace(node, inputs=named, outputs=(part,)))
        return part

    def _named(self, view: Tensor) -> Tensor:
        """Returns a tensor of the graph with the layout of `view`: `view` itself if it is in the
        graph, otherwise a new tensor.
        """
        if self.graph.tensors[view.id] == view:
            return view
        key = view.buffer.id, (view.offsets, view.shape)
        if key not in self.views:
            self.views[key] = self.graph.tensor_like(view, view.buffer)
        return self.views[key]
