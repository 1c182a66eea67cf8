"""Replaces an rmsnorm that is written op by op by one node, which reads each row once.

c = cast(x, fp32); y = c * rsqrt(mean(c * c) + eps); result = weight * y

The rows may be cast twice, once for the squares and once for the product, as T5's are.

Everything except the result is fp32. If y is rounded to the result's 16-bit type before it is
multiplied by a weight of that type, as norms in the transformers library do, the node is a
`rounded_rmsnorm`, which rounds at the same point. If the product is fp32, and rounded afterwards or
not at all, the node is an `rmsnorm`. Norms that round at other points are not replaced. Listed in
ark.lower.passes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ark.ir.attributes import NormAttributes, ReduceAttributes
from ark.ir.dtype import FLOATS, fp32
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.makers import Pattern, without
from ark.lower.rewrite.views import same_elements

SQUARE = ["mul", ["input", 0], ["input", 0]]


@dataclass(frozen=True)
class _Norm:
    """An rmsnorm that was recognised in the graph. rows: the tensor that it normalises. rounded:
    True if rows are rounded before they are multiplied by the weight. taken: ids of the nodes that
    the new node replaces.
    """

    rows: Tensor
    weight: Tensor
    eps: float
    rounded: bool
    taken: tuple[int, ...]


def fuse_rmsnorm(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which each recognised rmsnorm is a single node."""
    finder = _Finder(graph, context.kept)
    norms = {n.id: norm for n in graph.nodes if (norm := finder.ending_with(n)) is not None}
    if not norms:
        return graph
    taken = {number for norm in norms.values() for number in norm.taken}
    casts = {n.id for norm in norms.values() for n in finder.reading(norm.rows)}
    fused = graph.with_nodes(_fused(n, norms.get(n.id)) for n in graph.nodes)
    return without(fused, taken, casts, context.kept)


def _fused(node: Node, norm: _Norm | None) -> Node:
    if norm is None:
        return node
    kind = "rounded_rmsnorm" if norm.rounded else "rmsnorm"
    attrs = NormAttributes(eps=norm.eps, type=norm.weight.dtype.name if norm.rounded else "")
    inputs = (norm.rows, norm.weight)
    return dataclasses.replace(
        node, type=kind, name="rmsnorm", inputs=inputs, attrs=attrs.to_node()
    )


class _Finder(Pattern):
    """Recognises an rmsnorm by going backwards from its last node."""

    def reading(self, rows: Tensor) -> list[Node]:
        """The cast nodes that read the tensor `rows`."""
        return [n for n in self.view.readers.get(rows.id, ()) if n.type == "cast"]

    def ending_with(self, last: Node) -> _Norm | None:
        """The rmsnorm that ends with this node, which is the multiplication by the weight or a cast
        of its result. None if the node is not the end of an rmsnorm.
        """
        if last.hints is not None or len(last.outputs) != 1:
            return None
        out = last.outputs[0].dtype
        if last.type == "mul" and not (out == fp32 and self._is_rounded(last)):
            return self._weighted(last, last, ())
        product = self.maker(last.inputs[0], last) if last.type == "cast" else None
        if product is None or product.outputs[0].dtype != fp32 or out not in FLOATS:
            return None
        return self._weighted(product, last, (product.id,))

    def _is_rounded(self, product: Node) -> bool:
        """True if only a cast reads the result of the multiplication by the weight. The cast is
        then the last node of the norm.
        """
        out = product.outputs[0]
        if not self.private(out):
            return False
        (number,) = self.view.touching[out.buffer.id] - {product.id}
        reader = self.view.nodes[self.view.places[number]]
        return reader.type == "cast" and reader.outputs[0].dtype in FLOATS

    def _weighted(self, product: Node, last: Node, taken: tuple[int, ...]) -> _Norm | None:
        """The rmsnorm in which `product` multiplies the normalised rows by the weight; None if
        `product` is not such a multiplication.
        """
        if product.type != "mul" or len(product.inputs) != 2:
            return None
        for weight, value in itertools.permutations(product.inputs):
            alike = weight.dtype == value.dtype == product.outputs[0].dtype
            row = weight.shape == value.shape[-1:] and len(value.shape) > 1 and weight.dense
            node = self.maker(value, last) if alike and row else None
            rounded = node is not None and node.type == "cast" and value.dtype in FLOATS
            if node is None or (value.dtype != fp32 and not rounded):
                continue
            also = taken
            if rounded:
                also = (*taken, node.id)
                node = self.maker(node.inputs[0], last)
            for rows, eps, nodes in self._normed(node, last):
                out, given = last.outputs[0], (rows.buffer.id, weight.buffer.id)
                fits = rows.shape == value.shape == out.shape and out.buffer.id not in given
                if fits and self.view.steady((weight,), product, last):
                    return _Norm(rows, weight, eps, rounded, (*also, *nodes))
        return None

    def _normed(
        self, product: Node | None, last: Node
    ) -> Iterator[tuple[Tensor, float, tuple[int, ...]]]:
        """Yields (rows, eps, ids of the matched nodes) for each way in which the product's operands
        match rows * rsqrt(mean(rows * rows) + eps).
        """
        if product is None or product.type != "mul" or len(product.inputs) != 2:
            return
        for value, factor in itertools.permutations(product.inputs):
            root = self.maker(factor, last, "rsqrt")
            added = self._before(root, last, "add")
            mean = self._before(added, last, "reduce_mean")
            square = self._before(mean, last)
            if root is None or added is None or mean is None or square is None:
                continue
            axis = mean.read(ReduceAttributes).axis % len(value.shape)
            over = axis == len(value.shape) - 1 and factor.shape == (*value.shape[:-1], 1)
            nodes = (product, root, added, mean, square)
            plain = all(n.outputs[0].dtype == fp32 for n in nodes) and value.dtype == fp32
            eps = added.elementwise.scalar or 0.0
            squares = all(self._equal(t, value) for t in square.inputs) and (
                (square.type == "mul" and len({t.id for t in square.inputs}) == 1)
                or square.elementwise.expr == SQUARE
            )
            if over and plain and eps > 0.0 and squares and square.inputs:
                rows = self._rows(value, square, last)
                rows = rows and self._rows(square.inputs[0], square, last)
                if rows is not None:
                    yield rows, float(eps), tuple(n.id for n in nodes)

    def _before(self, node: Node | None, last: Node, kind: str = "") -> Node | None:
        """The node that computes the only input of `node`, if it has the type `kind`; None
        otherwise.
        """
        alone = node is not None and len(node.inputs) == 1
        return self.maker(node.inputs[0], last, kind) if node is not None and alone else None

    def _equal(self, a: Tensor, b: Tensor) -> bool:
        """True if a and b are one tensor, or casts of one tensor to one type."""
        if a.id == b.id:
            return True
        first, second = self._cast(a), self._cast(b)
        if first is None or second is None or a.dtype != b.dtype:
            return False
        return first.inputs[0].id == second.inputs[0].id

    def _cast(self, value: Tensor) -> Node | None:
        """The cast that computes the tensor `value`, if it casts a whole tensor of the same shape;
        None otherwise.
        """
        maker = self.makers.get(value.buffer.id)
        if maker is None or maker.type != "cast" or not same_elements(value, maker.outputs[0]):
            return None
        return maker if maker.inputs[0].shape == value.shape else None

    def _rows(self, value: Tensor, first: Node, last: Node) -> Tensor | None:
        """The rows that the new node reads: `value`, or the source of the cast that computes
        `value`. None if they are overwritten before the norm ends.
        """
        rows, begin = value, first
        cast = self._cast(value)
        if cast is not None and cast.inputs[0].dtype in FLOATS:
            rows, begin = cast.inputs[0], cast
        return rows if self.view.steady((rows,), begin, last) else None
