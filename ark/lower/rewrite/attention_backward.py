"""Builds the op that replaces the gradient of attention which is written as single ops, and lets it
write its results where they are read. Called by ark.lower.rewrite.fuse_attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import structs

from ark.ir.attributes import AttentionAttributes, AxisAttributes
from ark.ir.dtype import fp32
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.attention_gradients import Backward
from ark.lower.rewrite.makers import only_makers
from ark.lower.rewrite.strided import Writes, items_of, origins, place_of, rows_of
from ark.lower.rewrite.views import in_shape, same_elements, whole

ROW_ALIGNMENT_ELEMENTS = 8  # elements of a 16-bit type to a multiple of which rows and heads begin


class Builder:
    """Builds the nodes that replace the gradients of one attention."""

    def __init__(self, graph: Graph, backward: Backward, attention: Node) -> None:
        self.graph, self.backward, self.attention = graph, backward, attention

    def nodes(self, number: Callable[[], int], writes: Writes) -> list[Node]:
        """The nodes. number: returns the id of a new node. writes: the last writes before the first
        of the replaced ops.
        """
        how = self.attention.read(AttentionAttributes)
        query, key, value, *mask = self.attention.inputs
        result, logarithms = self.attention.outputs
        heads, width = how.heads, how.head_dim
        nodes: list[Node] = []

        def node(kind: str, inputs: Any, outputs: Any, attrs: Mapping[str, Any]) -> None:
            place = dataclasses.replace(self.backward.first, id=number(), type=kind, after=())
            nodes.append(
                dataclasses.replace(
                    place,
                    name=f"attention_gradient.{kind}" if kind != "attention_gradient" else kind,
                    inputs=tuple(inputs),
                    outputs=tuple(outputs),
                    attrs=attrs,
                )
            )

        given = self._laid(query.shape, heads, width, writes)
        batch, rows, _ = query.shape
        if given is None:
            given = self.graph.tensor(query.shape, query.dtype, name="attention_gradient.given")
            source = self._seen(self.backward.given, (batch, heads, rows, width))
            target = self._seen(given, (batch, rows, heads, width))
            node("transpose", [source], [target], {"perm": [0, 2, 1, 3]})
        split = (batch, rows, heads, width)
        products = self.graph.tensor(split, fp32, name="attention_gradient.products")
        tree = ["mul", ["input", 0], ["input", 1]]
        pair = [_by_head(self.graph, t, width) for t in (given, result)]
        node("elementwise", pair, [products], {"expr": tree, "shape": list(split)})
        sums = self.graph.tensor((*split[:-1], 1), fp32, name="attention_gradient.slopes")
        reduced = {"axis": 3, "function": "sum", "keepdims": True}
        node("reduce_sum", [products], [sums], reduced)
        slopes = self._seen(sums, split[:-1])
        outputs, behind = [], []
        for tensor, to in zip((query, key, value), self.backward.results, strict=True):
            length = tensor.shape[1]
            if heads == 1:
                outputs.append(self._seen(to, (batch, length, width)))
                continue
            outputs.append(self.graph.tensor(tensor.shape, to.dtype, name=to.name))
            source = self._seen(outputs[-1], (batch, length, heads, width))
            behind.append((source, self._seen(to, (batch, heads, length, width))))
        attrs = structs.replace(how, logarithms=False, strict=False)
        inputs = [query, key, value, given, logarithms, slopes, *mask]
        node("attention_gradient", inputs, outputs, attrs.to_node())
        for source, target in behind:
            node("transpose", [source], [target], {"perm": [0, 2, 1, 3]})
        return nodes

    def _seen(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        return self.graph.tensor(shape, tensor.dtype, buffer=tensor.buffer, name=tensor.name)

    def _laid(self, shape: Sequence[int], heads: int, width: int, writes: Writes) -> Tensor | None:
        """The result's gradient as rows of all heads, in the memory from which it was copied; None
        if no place has this layout.
        """
        given = self.backward.given
        rank = len(given.shape)
        axes = (tuple(range(rank - 2)), (rank - 2,), (rank - 1,))
        for place in list(origins(place_of(given, axes), writes, self.backward.first.phase))[::-1]:
            items = items_of(dataclasses.replace(given, buffer=place.buffer))
            rows = rows_of(place, heads, items)
            if rows is None or rows.shape != tuple(shape):
                continue
            steps = (rows.extents[1] * rows.extents[2], rows.extents[2], rows.offsets[2])
            split = rows.extents[2] % width == 0 and rows.offsets[2] % width == 0
            if split and all(s % ROW_ALIGNMENT_ELEMENTS == 0 for s in steps):
                return rows.tensor(self.graph, given, place)
        return None


def _by_head(graph: Graph, rows: Tensor, width: int) -> Tensor:
    """The view (batch, rows, heads, width) of rows of all heads."""
    batch, length, columns = rows.shape
    *outer, wide = rows.extents
    *begin, column = rows.offsets
    return graph.tensor(
        (batch, length, columns // width, width),
        rows.dtype,
        buffer=rows.buffer,
        extents=(*outer, wide // width, width),
        offsets=(*begin, column // width, 0),
        name=rows.name,
    )


def written_side_by_side(graph: Graph, kept: frozenset[int]) -> Graph:
    """The graph in which gradients of attention that a `concat` joins are written to their places
    in its result.
    """
    makers, touches = only_makers(graph), graph.view.touches
    changed: dict[int, Node] = {}
    idle: set[int] = set()
    for node in graph.nodes:
        out = node.outputs[0] if node.type == "concat" and not node.after else None
        if out is None or out.buffer.id not in makers or not whole(out):
            continue
        axis, begin, places = node.read(AxisAttributes).axis, 0, dict[int, Tensor]()
        for given in node.inputs:
            offsets = tuple(begin if d == axis else 0 for d in range(len(out.shape)))
            begin += given.shape[axis]
            maker = makers.get(given.buffer.id)
            alone = touches[given.buffer.id] == 2 and given.buffer.id not in kept
            if maker is None or maker.type != "attention_gradient" or not alone or node.hints:
                break
            written = next(t for t in maker.outputs if t.buffer.id == given.buffer.id)
            box = graph.tensor(
                given.shape, out.dtype, buffer=out.buffer, extents=out.shape, offsets=offsets
            )
            seen = box if box.shape == written.shape else in_shape(box, written.shape, named=True)
            if (
                seen is None
                or not same_elements(given, written)
                or any(s % ROW_ALIGNMENT_ELEMENTS for s in (*seen.strides[:-1], *seen.offsets[-1:]))
            ):
                break
            places[given.buffer.id] = seen
        if len(places) != len(node.inputs):
            continue
        idle.add(node.id)
        for maker in {makers[buffer].id: makers[buffer] for buffer in places}.values():
            maker = changed.get(maker.id, maker)
            outputs = tuple(places.get(t.buffer.id, t) for t in maker.outputs)
            changed[maker.id] = dataclasses.replace(maker, outputs=outputs)
    if not idle:
        return graph
    return graph.with_nodes(changed.get(n.id, n) for n in graph.nodes if n.id not in idle)
