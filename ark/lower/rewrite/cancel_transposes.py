"""Removes a transpose of rows before a linear layer together with the transpose after it, or only
one of the two.

A product with a weight computes each row independently, and so does an elementwise op whose other
inputs are equal for all rows. If only such ops are between the two transposes, the rows can keep
the order that they had before the first transpose. The second transpose, which restores this order,
is then not needed either. torch.nn.MultiheadAttention with batch_first=False has such transposes
around both of its projections.

A chain (first transpose, ops on rows, last transpose) is rewritten if at least one of the two
transposes can be removed. ark.lower.rewrite.row_regions then removes transposes around rows that
several ops read, as in training. Listed in ark.lower.passes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ark.ir.attributes import MatmulAttributes, TransposeAttributes
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor, dense_view
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_chains import read_once
from ark.lower.rewrite.makers import replaceable
from ark.lower.rewrite.row_regions import reordered
from ark.lower.rewrite.views import UNSEEN, same_elements, whole
from ark.tasks import expression
from ark.tasks.node_expressions import expression_of, is_elementwise


def cancel_transposes(graph: Graph, context: Context) -> Graph:
    """A copy of the graph without the transposes that cancel each other; the graph itself if it has
    none.
    """
    while (rewritten := _rewritten(graph, context.kept)) is not None:
        graph = rewritten
    return reordered(graph, context.kept)


def _rewritten(graph: Graph, kept: frozenset[int]) -> Graph | None:
    """The graph with its first chain of transpose, ops on rows and transpose rewritten; None if it
    has no such chain.
    """
    private = read_once(graph, kept)
    for node in graph.nodes:
        if node.type == "transpose" and _whole(node) and private(node.outputs[0]):
            chain = [node]
            while private(chain[-1].outputs[0]):
                reader = _reader(graph, chain[-1])
                if reader is None or not _joins(reader, chain[-1].outputs[0], node):
                    break
                chain.append(reader)
                if reader.type == "transpose":
                    break
            ends = len(chain) > 2 and chain[-1].type == "transpose"
            places = _reordered(graph, chain) if ends else None
            if places is not None:
                each = (places.get(n.id, n) for n in graph.nodes)
                return graph.with_nodes(n for n in each if n is not None)
    return None


def _whole(node: Node) -> bool:
    """True if the node may be replaced, its result fills its buffer, and no type is packed."""
    packed = any(t.dtype.packed for t in (*node.inputs, *node.outputs))
    return replaceable(node) and whole(node.outputs[0]) and not packed


def _reader(graph: Graph, node: Node) -> Node | None:
    """The only other node that accesses the buffer of a node's result. None if there are several,
    or if the only one reads the buffer through several of its inputs.
    """
    buffer, view = node.outputs[0].buffer.id, graph.view
    (number,) = view.touching[buffer] - {node.id}
    reader = graph.nodes[view.places[number]]
    return reader if sum(t.buffer.id == buffer for t in reader.inputs) == 1 else None


def _read(node: Node, out: Tensor) -> Tensor:
    """The input of `node` that is on the same buffer as `out`."""
    return next(t for t in node.inputs if t.buffer.id == out.buffer.id)


def _joins(node: Node, out: Tensor, first: Node) -> bool:
    """True if `node` can be the next op of a chain (transpose, ops on rows, transpose) after the
    node that computes `out`. first: the transpose with which the chain begins. Whether an
    elementwise op computes each row independently is checked later, when the number of rows is
    known.
    """
    read = _read(node, out)
    if node.placement != first.placement or not _whole(node) or not same_elements(read, out):
        return False
    if node.type == "matmul":
        given = node.read(MatmulAttributes)
        rows = node.inputs[0] is read and not given.transpose_a
        flat = len(read.shape) == len(node.inputs[1].shape) == len(node.outputs[0].shape) == 2
        return rows and flat and given.finish is None and len(node.inputs) == 2
    if node.type == "transpose":
        return True
    same_shape = is_elementwise(node) and read.shape == node.outputs[0].shape
    return same_shape and not expression.places(expression_of(node))


def _leading(shape: Sequence[int], rows: int) -> int | None:
    """The number of leading dimensions whose sizes multiply to `rows`; None if there is no such
    number.
    """
    held = 1
    for d, n in enumerate(shape):
        if held == rows:
            return d
        held *= n
    return len(shape) if held == rows else None


def _reordered(graph: Graph, chain: Sequence[Node]) -> dict[int, Node | None] | None:
    """The nodes that replace the nodes of a chain, by the id of the replaced node; None for a node
    that is removed. The new nodes compute rows in the order of the first transpose's source.
    Returns None if no transpose would be removed.
    """
    first, *between, last = chain
    counts = {n.inputs[0].shape[0] for n in between if n.type == "matmul"}
    if len(counts) != 1:
        return None
    (rows,) = counts
    begin = _first(first, rows)
    if begin is None:
        return None
    order, lead, leaves = begin
    ends = _last(last, rows, order, lead)
    if ends is None:
        return None
    shape, perm, out_shape = ends
    undone = perm == sorted(perm) and _unread_before(graph, last)
    if (not undone and not leaves) or (
        leaves and not graph.view.steady(first.inputs[:1], first, chain[1], own=True)
    ):
        return None
    placed: dict[int, Node | None] = {}
    source: Tensor | None = first.inputs[0]
    if leaves:
        placed[first.id] = None
    else:
        perm_of = first.read(TransposeAttributes).perm
        turned = [*sorted(perm_of[: len(lead)]), *perm_of[len(lead) :]]
        sizes = [first.inputs[0].shape[d] for d in turned]
        source = _on(graph, first.outputs[0], sizes)
        placed[first.id] = dataclasses.replace(first, outputs=(source,), attrs={"perm": turned})
    at = first.outputs[0]
    for node in between:
        target = last.outputs[0] if undone and node is between[-1] else node.outputs[0]
        moved = None if source is None else _by_rows(graph, node, at, source, target, rows)
        if moved is None:
            return None
        placed[node.id], at, source = moved, node.outputs[0], moved.outputs[0]
    read = None if source is None else _seen(graph, source, shape)
    if undone:
        placed[last.id] = None
    elif read is None:
        return None
    else:
        out = _on(graph, last.outputs[0], out_shape)
        attrs = {"perm": perm}
        placed[last.id] = dataclasses.replace(last, inputs=(read,), outputs=(out,), attrs=attrs)
    return placed


def _first(node: Node, rows: int) -> tuple[list[int], list[int], bool] | None:
    """How a chain's first transpose reorders rows. Each combination of indices in the leading
    dimensions of its result is a row. Returns three values: the leading dimensions, in the order
    that they have in the transpose's source; their sizes in the result; and True if the transpose
    can be removed when later nodes compute rows in the source's order. None if the transpose does
    not change the order of rows.
    """
    perm, shape = node.read(TransposeAttributes).perm, node.outputs[0].shape
    count = _leading(shape, rows)
    if count is None:
        return None
    order = sorted(range(count), key=perm.__getitem__)
    if [d for d in order if shape[d] > 1] == [d for d in range(count) if shape[d] > 1]:
        return None  # the order of rows does not change
    moved = [perm[d] for d in (*order, *range(count, len(perm))) if shape[d] > 1]
    leaves = moved == sorted(moved) and node.inputs[0].dense
    return order, list(shape[:count]), leaves


def _last(
    node: Node, rows: int, order: Sequence[int], lead: Sequence[int]
) -> tuple[list[int], list[int], list[int]] | None:
    """Adapts a chain's last transpose to rows in the order of the first transpose's source. order,
    lead: the first two results of `_first`. Returns the shape that the new transpose reads, its
    permutation and the shape of its result, all without dimensions of size 1. None if the
    dimensions that number the rows cannot be matched.
    """
    shape, perm = node.inputs[0].shape, node.read(TransposeAttributes).perm
    count = _leading(shape, rows)
    if count is None:
        return None
    groups: list[list[int]] = []
    at = 0
    for size in lead:
        begin, held = at, 1
        while held < size and at < count:
            held, at = held * shape[at], at + 1
        if held != size:
            return None
        groups.append(list(range(begin, at)))
    moved = [*(d for g in order for d in groups[g]), *range(count, len(shape))]
    dims = [d for d in moved if shape[d] > 1]
    kept = [d for d in perm if shape[d] > 1]
    return [shape[d] for d in dims], [dims.index(d) for d in kept], [shape[d] for d in kept]


def _by_rows(
    graph: Graph, node: Node, before: Tensor, source: Tensor, target: Tensor, rows: int
) -> Node | None:
    """A copy of `node` for rows in another order. It reads `source`, which has the rows of `before`
    in the other order, and writes its rows in that order to the buffer of `target`. None if another
    input of the node is not equal for all rows.
    """
    out = node.outputs[0]
    count = _leading(out.shape, rows)
    if count is None:
        return None
    read, shape = _read(node, before), (rows, *out.shape[count:])
    inputs: list[Tensor] = []
    for tensor in node.inputs:
        if tensor is read:
            seen = _seen(graph, source, read.shape if node.type == "matmul" else shape)
        elif node.type == "matmul":
            seen = tensor
        else:
            wide = (1,) * (len(out.shape) - len(tensor.shape)) + tensor.shape
            if any(n > 1 for n in wide[:count]):
                return None
            few = len(tensor.shape) <= len(out.shape) - count
            seen = tensor if few else _seen(graph, tensor, wide[count:])
        if seen is None:
            return None
        inputs.append(seen)
    result = _on(graph, target, shape)
    return dataclasses.replace(node, inputs=tuple(inputs), outputs=(result,))


def _seen(graph: Graph, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
    """The tensor viewed in another shape; None if its layout does not allow that."""
    view = dense_view(tensor, shape)
    if view is None or tensor.padded != tensor.shape:
        return None
    extents, offsets = view
    return graph.tensor(shape, tensor.dtype, buffer=tensor.buffer, extents=extents, offsets=offsets)


def _on(graph: Graph, target: Tensor, shape: Sequence[int]) -> Tensor:
    """A new tensor of the given shape that covers all of the target's buffer."""
    assert math.prod(shape) == target.elements
    return graph.tensor(shape, target.dtype, buffer=target.buffer, name=target.name)


def _unread_before(graph: Graph, last: Node) -> bool:
    """True if no node before the last transpose accesses the buffer of its result, so that an
    earlier node may write this buffer.
    """
    buffer, places = last.outputs[0].buffer, graph.view.places
    others = graph.view.touching[buffer.id] - {last.id}
    alone = buffer.arena in UNSEEN and len(graph.view.writers[buffer.id]) == 1
    return alone and all(places[number] > places[last.id] for number in others)
