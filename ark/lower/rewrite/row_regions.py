"""Removes transposes of rows around layers whose intermediate results are also read by gradients.

A transpose exchanges the two dimensions that number rows, as in torch.nn.MultiheadAttention with
batch_first=False. A region is a set of buffers with rows in the exchanged order, between such
transposes. All other ops that access a region must compute each row independently, or sum over all
rows, like the product that computes the gradient of a weight. Then the rows of the region can have
the order that they had before. Only the transposes at the ends of the region change: those that
exchange nothing any more are removed. Called by ark.lower.rewrite.cancel_transposes, which handles
chains of ops.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from ark.ir.attributes import (
    AxisAttributes,
    MatmulAttributes,
    ReduceAttributes,
    TransposeAttributes,
)
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.copies import read_in_place
from ark.lower.rewrite.fuse_chains import read_once
from ark.lower.rewrite.makers import only_makers, replaceable, without
from ark.lower.rewrite.views import in_shape, whole
from ark.tasks import expression
from ark.tasks.node_expressions import expression_of, is_elementwise

Sizes = tuple[int, int]  # of the two dimensions that number the rows, the outer one first


def reordered(graph: Graph, kept: frozenset[int]) -> Graph:
    """The graph with the rows of each region in the order that they have outside of it. The graph
    itself if it has no region.
    """
    graph = _joined_beside(graph, kept)
    seen: set[int] = set()
    ends: set[int] = set()  # ids of transposes whose results are read
    for node in graph.nodes:
        for buffer, sizes in _starts(node):
            if buffer in seen:
                continue
            region = _Region(graph, kept, sizes)
            if region.grow(buffer):
                seen |= region.buffers
                reads = graph.view.reads
                ends |= {n.id for n in region.ends.values() if reads[n.outputs[0].buffer.id]}
                graph = region.exchanged()
    return without(read_in_place(graph, kept), set(), ends, kept) if ends else graph


def _starts(node: Node) -> Iterator[tuple[int, Sizes]]:
    """The buffers at a transpose (rows, others, columns) to (others, rows, columns) from which a
    region may begin: the transpose's result and its source. Each with the two sizes there.
    """
    if node.type != "transpose" or not replaceable(node):
        return
    source, out = node.inputs[0], node.outputs[0]
    perm = [d for d in node.read(TransposeAttributes).perm if source.shape[d] > 1]
    if len(perm) == 3 and perm[0] > min(perm) and perm[2] == max(perm) and whole(source):
        first, second, _ = (n for n in out.shape if n > 1)
        yield out.buffer.id, (first, second)
        yield source.buffer.id, (second, first)


def _joined_beside(graph: Graph, kept: frozenset[int]) -> Graph:
    """The graph in which parts that a `concat` joins one after another, and that a transpose then
    places side by side in each row, are joined in this way at once.
    """
    makers, private = only_makers(graph), read_once(graph, kept)
    placed: dict[int, Node | None] = {}
    for node in graph.nodes:
        if node.type != "transpose" or not replaceable(node):
            continue
        source, out, maker = node.inputs[0], node.outputs[0], makers.get(node.inputs[0].buffer.id)
        if maker is None or maker.type != "concat" or not replaceable(maker) or not private(source):
            continue
        perm, parts = node.read(TransposeAttributes).perm, maker.inputs
        left = [d for d in perm if d and source.shape[d] > 1]
        equal = {t.shape for t in parts} == {parts[0].shape} and source.shape[0] == len(parts)
        joined = maker.read(AxisAttributes).axis == 0 and all(map(whole, (source, out, *parts)))
        if not (equal and joined and left == sorted(left)) or maker.placement != node.placement:
            continue
        if not graph.view.steady(parts, maker, node):
            continue
        rows = math.prod(out.shape[: perm.index(0)])
        wide = _shaped(graph, out, (rows, out.elements // rows))
        columns = wide.shape[1] // len(parts)
        inputs = tuple(_shaped(graph, t, (rows, columns)) for t in parts)
        placed[maker.id] = None
        placed[node.id] = dataclasses.replace(
            maker, id=node.id, inputs=inputs, outputs=(wide,), attrs={"axis": 1}
        )
    if not placed:
        return graph
    each = (placed.get(n.id, n) for n in graph.nodes)
    return graph.with_nodes(n for n in each if n is not None)


def _shaped(graph: Graph, tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """All of a tensor's buffer viewed in this shape."""
    return graph.tensor(shape, tensor.dtype, buffer=tensor.buffer, name=tensor.name)


class _Region:
    """The buffers of a region, and the transposes at its ends. sizes: the sizes of the dimensions
    that number rows in the region. Outside of it, the second one comes first.
    """

    def __init__(self, graph: Graph, kept: frozenset[int], sizes: Sizes) -> None:
        self.graph, self.kept, self.sizes = graph, kept, sizes
        self.rows = math.prod(sizes)
        self.buffers: set[int] = set()
        self.ends: dict[int, Node] = {}
        self.makers = only_makers(graph)

    def grow(self, buffer: int) -> bool:
        """Adds this buffer and all others that must have the same order of rows. False if an op
        needs the order that the region has now, or if no transpose would become unnecessary.
        """
        nodes, places = self.graph.nodes, self.graph.view.places
        pending = [buffer]
        while pending:
            at = pending.pop()
            if at in self.buffers:
                continue
            self.buffers.add(at)
            result = at in self.kept or not self.graph.view.reads[at]
            if at not in self.makers or result:
                return False
            for number in sorted(self.graph.view.touching[at]):
                node = nodes[places[number]]
                beside = self._same_order(node, at)
                if beside is None or node.placement != self.makers[at].placement:
                    return False
                pending += [t.buffer.id for t in beside]
        ends = list(self.ends.values())
        changed = [e for n in ends if (e := self._exchange(n)) is not None]
        return len(changed) == len(ends) and _moving(changed) < _moving(ends)

    def _same_order(self, node: Node, buffer: int) -> Iterable[Tensor] | None:
        """The operands of a node that must have the same order of rows as a buffer that it
        accesses. None if the node depends on the order of the rows.
        """
        mine = [t for t in (*node.inputs, *node.outputs) if t.buffer.id == buffer]
        out = node.outputs[0]
        if not replaceable(node) or not all(whole(t) and not t.dtype.packed for t in mine):
            return None
        if node.type == "transpose":
            self.ends[node.id] = node
            return ()
        if node.type == "matmul":
            return self._product(node, buffer)
        if node.type == "reduce_sum":
            given, source = node.read(ReduceAttributes), node.inputs[0]
            summed = given.axis == 0 and source.shape[0] == self.rows and len(source.shape) == 2
            return () if summed and out.buffer.id != buffer else None
        if node.type == "concat":
            beside = node.read(AxisAttributes).axis == len(out.shape) - 1
            return (*node.inputs, out) if beside and self._leading(out) is not None else None
        if not is_elementwise(node) or expression.places(expression_of(node)):
            return None
        return self._of_rows(node, buffer)

    def _product(self, node: Node, buffer: int) -> Iterable[Tensor] | None:
        given, (left, right, *more), out = node.read(MatmulAttributes), node.inputs, node.outputs[0]
        flat = all(len(t.shape) == 2 for t in (left, right, out)) and not more
        if not flat or given.finish is not None or right.shape == out.shape == left.shape:
            return None
        if given.transpose_a:
            summed = left.shape[0] == right.shape[0] == self.rows and not given.transpose_b
            return (left, right) if summed and out.buffer.id != buffer else None
        return (left, out) if right.buffer.id != buffer and left.shape[0] == self.rows else None

    def _leading(self, tensor: Tensor) -> int | None:
        """The number of leading dimensions that number the rows; None if there is no such number.
        It includes dimensions of size 1 before the columns.
        """
        shape = tensor.shape
        ends = (d for d in range(len(shape)) if math.prod(shape[:d]) == self.rows)
        return next(ends, None)

    def _of_rows(self, node: Node, buffer: int) -> Iterable[Tensor] | None:
        """The operands of an elementwise op that have a value for each row, if those on the buffer
        are among them, and all others are equal for all rows; otherwise None.
        """
        out = node.outputs[0]
        count = self._leading(out)
        if count is None:
            return None
        own = [out]
        for tensor in node.inputs:
            lead = ((1,) * (len(out.shape) - len(tensor.shape)) + tensor.shape)[:count]
            if lead == out.shape[:count]:
                own.append(tensor)
            elif tensor.buffer.id == buffer or any(n > 1 for n in lead):
                return None
        return own if all(map(whole, own)) else None

    def exchanged(self) -> Graph:
        """The graph with the region's rows in the other order."""
        changed = {n.id: self._exchange(n) or n for n in self.ends.values()}
        return self.graph.with_nodes(changed.get(n.id, n) for n in self.graph.nodes)

    def _exchange(self, node: Node) -> Node | None:
        """The transpose at an end of the region for rows in the other order; None if its dimensions
        cannot be divided accordingly.
        """
        source, out = node.inputs[0], node.outputs[0]
        dims = _Dims(source.shape, node.read(TransposeAttributes).perm)
        inside = [t.buffer.id in self.buffers for t in (source, out)]
        for _ in range(2):  # dividing a dimension of one side divides one of the other
            for side, within in zip((dims.source, dims.out), inside, strict=True):
                if within and dims.leading(side, self.sizes) is None:
                    return None
        orders = []
        for side, within in zip((dims.source, dims.out), inside, strict=True):
            groups = dims.leading(side, self.sizes) if within else None
            first, second = groups or ([], [])
            rest = side[len(first) + len(second) :]
            orders.append([d for d in (*second, *first, *rest) if dims.size[d] > 1])
        shapes = [[dims.size[d] for d in order] for order in orders]
        views = [in_shape(t, s, named=True) for t, s in zip((source, out), shapes, strict=True)]
        if views[0] is None or views[1] is None or not shapes[0]:
            return None
        perm = [orders[0].index(d) for d in orders[1]]
        return dataclasses.replace(
            node, inputs=(views[0],), outputs=(views[1],), attrs={"perm": perm}
        )


def _moving(transposes: Sequence[Node]) -> int:
    """The number of transposes that change the order of elements in memory."""
    perms = [
        [d for d in n.read(TransposeAttributes).perm if n.inputs[0].shape[d] > 1]
        for n in transposes
    ]
    return sum(perm != sorted(perm) for perm in perms)


class _Dims:
    """The dimensions of a transpose, by number, in the order of its source and of its result.
    size: by number, a dimension's size. Dimensions may be divided.
    """

    def __init__(self, shape: Sequence[int], perm: Sequence[int]) -> None:
        self.size = list(shape)
        self.source, self.out = list(range(len(shape))), list(perm)

    def leading(self, order: list[int], sizes: Sizes) -> tuple[list[int], list[int]] | None:
        """The first dimensions of `order`, in two groups that have `sizes` elements each. A
        dimension is divided if it is in both groups, or in the second and the rest. None if there
        are no such groups.
        """
        at, groups = 0, list[list[int]]()
        for wanted in sizes:
            group: list[int] = []
            while wanted > 1:
                if at == len(order):
                    return None
                size = self.size[order[at]]
                if size > wanted and size % wanted == 0:
                    self._divide(order[at], wanted)
                    size = wanted
                if wanted % size:
                    return None
                group.append(order[at])
                wanted, at = wanted // size, at + 1
            groups.append(group)
        return groups[0], groups[1]

    def _divide(self, dim: int, outer: int) -> None:
        """Divides a dimension into one of `outer` elements, and one of the rest after it."""
        inner = len(self.size)
        self.size.append(self.size[dim] // outer)
        self.size[dim] = outer
        for order in (self.source, self.out):
            order.insert(order.index(dim) + 1, inner)
