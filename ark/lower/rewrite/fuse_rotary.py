"""Fuses rotary embeddings that are written op by op, so that the negated copy and the concatenation
are not stored. The expression

x * cosines + concat(-x[second half], x[first half]) * sines

becomes two elementwise nodes, one for each half of the result. If heads were transposed before the
rotation, the transpose is moved after it, because attention can read its source instead
(ark.lower.rewrite.fuse_attention). Intermediate values are fp32, as in fused chains. Listed in
ark.lower.passes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ark.ir.attributes import AxisAttributes, TransposeAttributes
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor, dense_view
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.makers import Pattern, without
from ark.lower.rewrite.views import same_elements, whole
from ark.tasks import expression
from ark.tasks.expression import Tree

FIRST: Tree = [
    "add",
    ["mul", ["input", 0], ["input", 1]],
    ["mul", ["neg", ["input", 2]], ["input", 3]],
]
SECOND: Tree = ["add", ["mul", ["input", 0], ["input", 1]], ["mul", ["input", 2], ["input", 3]]]


@dataclass(frozen=True)
class _Rotation:
    """A rotary embedding that was recognised in the graph. rows: the tensor that it rotates. begin:
    the first node that reads the rows. taken: ids of the nodes that the new nodes replace.
    """

    rows: Tensor
    cosines: Tensor
    sines: Tensor
    begin: Node
    taken: tuple[int, ...]


def fuse_rotary(graph: Graph, context: Context) -> Graph:
    """A copy of the graph with rotary embeddings fused."""
    pattern = Pattern(graph, context.kept)
    numbers = itertools.count(1 + max((n.id for n in graph.nodes), default=0))
    taken: set[int] = set()
    turned: set[int] = set()
    nodes: list[Node] = []
    for node in graph.nodes:
        rotation = _rotation(pattern, node)
        if rotation is None:
            nodes.append(node)
        else:
            taken.update(rotation.taken)
            maker = pattern.makers.get(rotation.rows.buffer.id)
            turned.update(() if maker is None or maker.type != "transpose" else (maker.id,))
            nodes += _halves(graph, pattern, node, rotation, numbers)
    if not taken:
        return graph
    return without(graph.with_nodes(nodes), taken, turned, context.kept)


def _rotation(pattern: Pattern, last: Node) -> _Rotation | None:
    """The rotary embedding whose last node is this addition; None if the node is not the end of
    one.
    """
    if last.type != "add" or len(last.inputs) != 2 or last.hints is not None:
        return None
    out = last.outputs[0]
    for straight, crossed in itertools.permutations(last.inputs):
        near, far = (pattern.maker(t, last, "mul") for t in (straight, crossed))
        if near is None or far is None or not len(near.inputs) == len(far.inputs) == 2:
            continue
        pairs = itertools.product(*(itertools.permutations(n.inputs) for n in (near, far)))
        for (rows, cosines), (turned, sines) in pairs:
            joined = pattern.maker(turned, last, "concat")
            if joined is None or len(joined.inputs) != 2 or turned.shape != out.shape:
                continue
            first, second = joined.inputs
            flipped = pattern.maker(first, last, "neg")
            if (
                flipped is None
                or joined.read(AxisAttributes).axis % len(out.shape) != len(out.shape) - 1
            ):
                continue
            sides = _half(rows, 0), _half(rows, 1)
            alike = rows.shape == out.shape and rows.dtype == out.dtype
            crossing = _same(second, sides[0]) and _same(flipped.inputs[0], sides[1])
            if alike and crossing and not rows.dtype.packed and straight.shape == out.shape:
                nodes = (near, far, joined, flipped)
                begin = min(nodes, key=lambda n: pattern.view.places[n.id])
                read = (rows, cosines, sines)
                apart = out.buffer.id not in {t.buffer.id for t in read}
                if apart and pattern.view.steady(read, begin, last):
                    taken = (last.id, *(n.id for n in nodes))
                    return _Rotation(rows, cosines, sines, begin, taken)
    return None


def _half(tensor: Tensor, half: int) -> Tensor:
    """One half of the last dimension; the tensor itself if that dimension has size 1."""
    if tensor.shape[-1] == 1:
        return tensor
    width = tensor.shape[-1] // 2
    shape = (*tensor.shape[:-1], width)
    offsets = (*tensor.offsets[:-1], tensor.offsets[-1] + half * width)
    return dataclasses.replace(tensor, shape=shape, offsets=offsets, padded=shape)


def _same(a: Tensor, b: Tensor) -> bool:
    """True if both tensors view the same elements of the same buffer in the same shape."""
    return a.buffer.id == b.buffer.id and (a.shape, a.extents, a.offsets, a.dtype) == (
        b.shape,
        b.extents,
        b.offsets,
        b.dtype,
    )


def _halves(
    graph: Graph, pattern: Pattern, last: Node, rotation: _Rotation, numbers: Iterator[int]
) -> list[Node]:
    """The two nodes that compute the halves of a rotary embedding's result. A third node follows if
    a transpose of heads is moved behind the rotation.
    """
    rows, out = rotation.rows, last.outputs[0]
    given = (rotation.cosines, rotation.sines)
    behind: list[Node] = []
    transpose = pattern.makers.get(rows.buffer.id)
    if transpose is not None and _turns_heads(pattern, transpose, rotation, last):
        perm = transpose.read(TransposeAttributes).perm
        before = [_before(graph, t, perm) for t in given]
        source = transpose.inputs[0]
        if all(t is not None for t in before):
            target = graph.tensor(source.shape, out.dtype, name=out.name)
            behind.append(
                dataclasses.replace(transpose, id=next(numbers), inputs=(target,), outputs=(out,))
            )
            rows, out = source, target
            given = (before[0] or given[0], before[1] or given[1])
    halves: list[Node] = []
    for half, tree in enumerate((FIRST, SECOND)):
        sides = (rows, given[0], rows, given[1])
        cut = [_half(t, half ^ (place == 2)) for place, t in enumerate(sides)]
        inputs = tuple(graph.tensor_like(t, t.buffer, t.name) for t in cut)
        kinds = [t.dtype.name for t in inputs]
        attrs = {"expr": expression.typed(tree, kinds, out.dtype.name)}
        part = _half(out, half)
        output = graph.tensor_like(part, part.buffer, part.name)
        halves.append(
            last.beside(next(numbers), "elementwise", inputs, output, attrs, name="rotary")
        )
    return [*halves, *behind]


def _turns_heads(pattern: Pattern, node: Node, rotation: _Rotation, last: Node) -> bool:
    """True if a rotary embedding can read the source of the transpose `node` instead of its result.
    The transpose must keep the last dimension last, and nothing may write its source before the
    rotation ends.
    """
    if node.type != "transpose" or node.hints is not None or not whole(rotation.rows):
        return False
    perm, out = node.read(TransposeAttributes).perm, node.outputs[0]
    plain = perm[-1] == len(perm) - 1 and node.placement == last.placement
    same = out.shape == rotation.rows.shape and same_elements(out, rotation.rows)
    source = node.inputs[0]
    return plain and same and pattern.view.steady((source,), node, last)


def _before(graph: Graph, tensor: Tensor, perm: list[int]) -> Tensor | None:
    """A view of `tensor` (cosines or sines) for a rotation that is applied before a transpose
    instead of after it. `tensor` broadcasts to the result of the transpose; the view broadcasts to
    the source of the transpose. None if elements would have to be rearranged in memory.
    """
    wide = (1,) * (len(perm) - len(tensor.shape)) + tensor.shape
    shape = [1] * len(perm)
    for d, n in zip(perm, wide, strict=True):
        shape[d] = n
    order = [d for d, n in zip(perm, wide, strict=True) if n > 1]
    view = dense_view(tensor, shape)
    if order != sorted(order) or view is None or tensor.padded != tensor.shape:
        return None
    extents, offsets = view
    return graph.tensor(shape, tensor.dtype, buffer=tensor.buffer, extents=extents, offsets=offsets)
