"""Replaces attention that is written as product, softmax and product by one op, which never stores
the scores in memory.

softmax(q k^T [times a scale] [masked causally] [under a mask]) v

The new op reads queries, keys and values from the tensors from which they were transposed to heads.
It also reads keys and values from before their heads were repeated for groups of query heads.
Results are written in the layout that the next product reads. A mask that depends on constants only
is recognised as causal, or as masking nothing. Any other mask becomes an operand of the attention:
it is added to the scores or selects the visible keys. The ops stay as they are if another op reads
scores or weights, or if matrix units do not support the attention. Listed in ark.lower.passes.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from ark.ir.attributes import AttentionAttributes, MatmulAttributes
from ark.ir.dtype import FLOATS
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor, dense_view
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.copies import read_in_place, without_unread
from ark.lower.rewrite.fuse_chains import read_once
from ark.lower.rewrite.makers import only_makers
from ark.lower.rewrite.masks import Mask, Masks
from ark.lower.rewrite.strided import (
    Place,
    Rows,
    Writes,
    heads_of,
    items_of,
    origins,
    place_of,
    rows_of,
)
from ark.lower.rewrite.views import in_shape, same_elements, whole
from ark.lower.tiling import attends
from ark.machine import Machine

MAX_HEADS = 1 << 12


@dataclass
class _Found:
    """An attention that was recognised in the graph. query, key: the operands of the product that
    computes the scores. scale: the factor of the scores. weights: the ops between the scores and
    the second product. taken: ids of the nodes that the new op replaces.
    """

    query: Tensor
    key: Tensor
    flipped: bool  # True if the keys are (width, context)
    scale: float
    weights: _Weights
    taken: list[int] = field(default_factory=list)
    read: int = 0  # index of the first op that reads queries or keys


@dataclass
class _Weights:
    """The ops that turn scores into attention weights: scale, masks and softmax. strict: True for a
    softmax that gives NaN if all keys are masked. masked: index of the op that reads the mask.
    """

    scale: float = 1.0
    causal: bool = False
    strict: bool = False
    mask: Mask | None = None
    masked: int = 0


def fuse_attention(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which each recognised attention is a single op."""
    kept = context.kept
    finder = _Finder(graph, kept, context.machine)
    last: dict[int, tuple[int, Node]] = {}
    nodes: list[Node] = []
    taken: set[int] = set()
    for place, node in enumerate(graph.nodes):
        match = finder.attention(node, Writes(last)) if node.type == "matmul" else None
        if match is None:
            nodes.append(node)
        else:
            scores, built = match
            taken.update(scores.taken)
            nodes += built
            for one in built:
                for tensor in one.outputs:
                    last[tensor.buffer.id] = (place, one)
        for tensor in node.outputs:
            if match is None or tensor.buffer.id not in last:
                last[tensor.buffer.id] = (place, node)
    if not taken:
        return graph
    left = graph.with_nodes(n for n in nodes if n.id not in taken)
    return without_unread(read_in_place(left, kept), kept, finder.masks.known)


class _Finder:
    """Recognises attention by going backwards from its last product."""

    def __init__(self, graph: Graph, kept: frozenset[int], machine: Machine) -> None:
        self.machine = machine
        self.graph, self.private = graph, read_once(graph, kept)
        self.makers = only_makers(graph)
        self.number = max((n.id for n in graph.nodes), default=0)
        self.masks = Masks(self.makers)
        self.places = graph.view.places

    def maker(self, tensor: Tensor) -> Node | None:
        """The node whose only result is this tensor, if the tensor fills its buffer; None
        otherwise.
        """
        node = self.makers.get(tensor.buffer.id)
        fits = node is not None and len(node.outputs) == 1 and node.hints is None
        return node if fits and node and same_elements(tensor, node.outputs[0]) else None

    def attention(self, product: Node, writes: Writes) -> tuple[_Found, list[Node]] | None:
        """The attention that ends with this product, and the nodes that replace its ops: one
        attention node and, if needed, a transpose of its result. None if the product is not the end
        of an attention.
        """
        scores = self._scores(product)
        return None if scores is None else self._built(product, scores, writes)

    def _scores(self, product: Node) -> _Found | None:
        given = product.read(MatmulAttributes)
        if product.hints or given.finish or given.transpose_a:
            return None
        at, weights = product.inputs[0], None
        taken = [product.id]
        while (node := self.maker(at)) is not None and self.private(node.outputs[0]):
            rows = node.outputs[0].shape[-2:]
            if node.placement != product.placement or node.after or at.shape[-2:] != rows:
                return None
            taken.append(node.id)
            if node.type == "matmul":
                return self._product(node, weights, taken) if weights else None
            if node.type in ("softmax", "safe_softmax") and weights is None:
                weights = _Weights(strict=node.type == "softmax")
            elif node.type in ("mul", "div") and weights and node.elementwise.scalar is not None:
                by = float(node.elementwise.scalar)
                if len(node.inputs) != 1 or by <= 0.0 or not math.isfinite(by):
                    return None
                scale = weights.scale
                weights.scale = scale * by if node.type == "mul" else scale / by
                if not 0.0 < weights.scale < math.inf:
                    return None
            elif weights and (under := self._under(node, weights)) is not None:
                at = under
                continue
            elif node.type != "cast" or node.outputs[0].dtype not in FLOATS:
                return None
            at = node.inputs[0]
        return None

    def _under(self, node: Node, weights: _Weights) -> Tensor | None:
        """The scores that the node masks; None for any other node."""
        if not weights.causal and (known := self.masks.masked(node, weights.scale)) is not None:
            scores, weights.causal = known
            return scores
        read = self.masks.read(node, weights.scale) if weights.mask is None else None
        if read is None:
            return None
        scores, weights.mask = read
        weights.masked = self.places[weights.mask.reader.id]
        return scores

    def _product(self, node: Node, weights: _Weights, taken: list[int]) -> _Found | None:
        """The attention whose scores this product computes. If queries and keys are multiplied by
        constants before, the constants become part of the scores' factor. None if the product does
        not compute scores.
        """
        given, scale = node.read(MatmulAttributes), weights.scale
        if given.finish or given.transpose_a:
            return None
        sides, first = [], self.places[node.id]
        for side in node.inputs:
            maker = self.maker(side)
            if maker is not None and maker.type == "mul" and len(maker.inputs) == 1:
                start = maker.inputs[0]
                if start.shape == side.shape or whole(start):
                    scale *= float(maker.elementwise.scalar or 0.0)
                    first = min(first, self.places[maker.id])
                    side = start if start.shape == side.shape else _seen(start, side)
            sides.append(side)
        if not 0.0 < scale < math.inf:
            return None
        flipped = not given.transpose_b
        return _Found(sides[0], sides[1], flipped, scale, weights, taken, first)

    def _built(
        self, product: Node, scores: _Found, writes: Writes
    ) -> tuple[_Found, list[Node]] | None:
        out, value = product.outputs[0], product.inputs[1]
        tensors = (scores.query, scores.key, value)
        rank, width = len(out.shape), out.shape[-1]
        leads = {t.shape[:-2] for t in (*tensors, out)}
        written = (writes.last.get(t.buffer.id, (-1, None))[0] for t in tensors[:2])
        if any(place >= scores.read for place in written):
            return None
        mask, masked = scores.weights.mask, scores.weights.masked
        if mask and writes.last.get(mask.tensor.buffer.id, (-1, None))[0] >= masked:
            return None
        if rank < 2 or len(leads) != 1 or len({t.dtype for t in (*tensors, out)}) != 1:
            return None
        lead = tuple(range(rank - 2))
        turned = (False, scores.flipped, product.read(MatmulAttributes).transpose_b)
        for operands, group in self._forms(tensors, turned, writes):
            places: list[list[Place]] = []
            for tensor, flip in zip(operands, turned, strict=True):
                rows, columns = (rank - 1, rank - 2) if flip else (rank - 2, rank - 1)
                if tensor.shape[columns] != width:
                    return None
                axes = (lead, (rows,), (columns,))
                places.append(list(origins(place_of(tensor, axes), writes, product.phase))[::-1])
            matrices = math.prod(out.shape[:-2])
            for heads in dict.fromkeys((*(heads_of(p) for p in places[0]), 1)):
                if matrices % heads or heads > MAX_HEADS or heads % group:
                    continue
                counts = (heads, heads // group, heads // group)
                laid = [
                    self._laid(t, p, n) for t, p, n in zip(operands, places, counts, strict=True)
                ]
                if any(t is None for t in laid):
                    continue
                node = self._node(product, scores, [t for t in laid if t is not None], heads)
                if node is not None:
                    return scores, node
        return None

    def _forms(
        self, tensors: tuple[Tensor, ...], turned: tuple[bool, ...], writes: Writes
    ) -> list[tuple[tuple[Tensor, ...], int]]:
        """The operands (query, key, value) that the new op may read, in order of preference, each
        with the number of query heads that share keys and values. If heads of keys and values were
        repeated, the tensors from before the repetition come first.
        """
        forms: list[tuple[tuple[Tensor, ...], int]] = [(tensors, 1)]
        query, *others = tensors
        if any(turned) or len(query.shape) < 3:
            return forms
        before = [self._unrepeated(t, writes) for t in others]
        shared = [b for b in before if b is not None]
        if len(shared) == len(others) and len({group for _, group in shared}) == 1:
            forms.insert(0, ((query, *(t for t, _ in shared)), shared[0][1]))
        return forms

    def _unrepeated(self, tensor: Tensor, writes: Writes) -> tuple[Tensor, int] | None:
        """For keys or values whose heads were repeated for groups of query heads: the tensor before
        the repetition, and the size of a group. None if they were not repeated.
        """
        node = self.maker(tensor)
        if node is None or node.type != "expand" or node.elementwise.expr != ["input", 0]:
            return None
        (source,), shape = node.inputs, node.outputs[0].shape
        rank, group = len(shape), shape[-3] if len(shape) > 3 else 0
        wanted = (*shape[:-3], 1, *shape[-2:])
        alike = rank > 3 and source.shape == wanted and shape[-2:] == tensor.shape[-2:]
        if not alike or tensor.shape[-3] % group:
            return None
        if writes.last.get(source.buffer.id, (-1, None))[0] > self.places[node.id]:
            return None
        heads = (*tensor.shape[:-3], tensor.shape[-3] // group, *tensor.shape[-2:])
        seen = in_shape(source, heads)
        return None if seen is None else (seen, group)

    def _laid(self, tensor: Tensor, places: list[Place], heads: int) -> Tensor | None:
        """The operand as rows that hold all heads side by side, read from the first of the given
        places in memory where its elements have that layout. None if they have it in no place.
        """
        items = items_of(tensor)
        for place in places:
            rows = rows_of(place, heads, items_of(dataclasses.replace(tensor, buffer=place.buffer)))
            if rows is not None and items:
                return self._tensor(tensor, rows, place)
        return None

    def _tensor(self, tensor: Tensor, rows: Rows, place: Place) -> Tensor:
        return self.graph.tensor(
            rows.shape,
            tensor.dtype,
            buffer=place.buffer,
            extents=rows.extents,
            offsets=rows.offsets,
            name=tensor.name,
        )

    def _by_head(self, mask: Mask, batch: int, heads: int) -> Tensor | None:
        """The mask viewed as (batch, heads, rows, keys), where a size may be 1 instead (the mask is
        then the same for all indices). None if its layout does not allow this view.
        """
        tensor, shape = mask.tensor, mask.by_head(batch, heads)
        view = dense_view(tensor, shape) if shape else None
        if shape is None or view is None:
            return None
        extents, offsets = view
        return self.graph.tensor(
            shape,
            tensor.dtype,
            buffer=tensor.buffer,
            extents=extents,
            offsets=offsets,
            name=tensor.name,
        )

    def _node(
        self, product: Node, scores: _Found, operands: list[Tensor], heads: int
    ) -> list[Node] | None:
        out, width = product.outputs[0], product.outputs[0].shape[-1]
        query, weights = operands[0], scores.weights
        mask = self._by_head(weights.mask, query.shape[0], heads) if weights.mask else None
        if weights.mask and mask is None:
            return None
        attrs = AttentionAttributes(
            heads=heads,
            head_dim=width,
            scale=scores.scale,
            causal=weights.causal,
            placed=False,
            by_rows=True,
            mask=weights.mask.form if weights.mask else "",
            fill=weights.mask.fill if weights.mask else -math.inf,
            strict=weights.strict and mask is not None,
        )
        batch, rows = query.shape[:2]
        if not whole(out):
            return None
        behind: list[Node] = []
        if heads == 1:
            result = self.graph.tensor(query.shape, out.dtype, buffer=out.buffer, name=out.name)
        else:
            result = self.graph.tensor(query.shape, out.dtype, name=out.name)
            by_row, by_head = (batch, rows, heads, width), (batch, heads, rows, width)
            source = self.graph.tensor(by_row, out.dtype, buffer=result.buffer, name=out.name)
            target = self.graph.tensor(by_head, out.dtype, buffer=out.buffer, name=out.name)
            self.number += 1
            turned = dataclasses.replace(
                product,
                id=self.number,
                type="transpose",
                name="attention.transpose",
                inputs=(source,),
                outputs=(target,),
                attrs={"perm": [0, 2, 1, 3]},
                after=(),
            )
            behind.append(turned)
        self.number += 1
        attention = dataclasses.replace(
            product,
            id=self.number,
            type="attention",
            name="attention",
            inputs=(*operands, *([mask] if mask else [])),
            outputs=(result,),
            attrs=attrs.to_node(),
        )
        return [attention, *behind] if attends(attention, self.machine) else None


def _seen(source: Tensor, like: Tensor) -> Tensor:
    """The tensor `source`, which fills its buffer, viewed in the shape of `like`."""
    zeros = (0,) * len(like.shape)
    return dataclasses.replace(
        source, shape=like.shape, extents=like.shape, offsets=zeros, padded=like.shape
    )
