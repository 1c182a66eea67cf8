"""Replaces attention that is written as product, softmax and product by one op, which never stores
the scores in memory.

softmax(q k^T [times a scale] [masked causally] [under a mask]) v

The new op reads queries, keys and values from the tensors from which they were transposed to heads.
It also reads keys and values from before their heads were repeated for groups of query heads.
Results are written in the layout that the next product reads. A mask that depends on constants only
is recognised as causal, or as masking nothing. Any other mask becomes an operand of the attention:
it is added to the scores or selects the visible keys. Several masks that are added, as a bias by
head and a mask by window, are summed first. The ops stay as they are if another op reads scores or
weights, or if matrix units do not support the attention. Listed in ark.lower.passes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.ir.attributes import AttentionAttributes, MatmulAttributes
from ark.ir.dtype import FLOATS, fp32
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.attention_backward import Builder, written_side_by_side
from ark.lower.rewrite.attention_gradients import Backward, backwards
from ark.lower.rewrite.attention_recognised import Recognised, Weights
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.copies import read_in_place, without_unread
from ark.lower.rewrite.fuse_chains import read_once
from ark.lower.rewrite.makers import only_makers
from ark.lower.rewrite.masks import Mask, Masks
from ark.lower.rewrite.strided import (
    Place,
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


def fuse_attention(graph: Graph, context: Context, gradients: bool = False) -> Graph:
    """A copy of the graph in which each recognised attention is a single op. gradients: True if the
    gradients of attention become single ops, too; otherwise attention with gradients stays.
    """
    kept = context.kept
    finder = _Finder(graph, kept, context.machine, backwards(graph, kept) if gradients else {})
    last: dict[int, tuple[int, Node]] = {}
    nodes: list[Node] = []
    taken: set[int] = set()
    pending: dict[int, Builder] = {}  # by the first of the ops that a gradient replaces
    for place, node in enumerate(graph.nodes):
        match = finder.attention(node, Writes(last)) if node.type == "matmul" else None
        built: list[Node] = []
        if match is None:
            builder = pending.get(node.id)
            built = builder.nodes(finder.next_id, Writes(last)) if builder else []
            nodes += [*built, node]
        else:
            scores, built = match
            taken.update(scores.taken)
            nodes += built
            if (backward := scores.weights.backward) is not None:
                taken |= backward.taken
                attention = next(n for n in built if n.type == "attention")
                pending[backward.first.id] = Builder(graph, backward, attention)
        for one in built:
            for tensor in one.outputs:
                last[tensor.buffer.id] = (place, one)
        for tensor in node.outputs:
            if node.id not in taken or tensor.buffer.id not in last:
                last[tensor.buffer.id] = (place, node)
    if not taken:
        return graph
    left = graph.with_nodes(n for n in nodes if n.id not in taken)
    left = without_unread(read_in_place(left, kept), kept, finder.masks.known)
    return written_side_by_side(left, kept) if pending else left


class _Finder:
    """Recognises attention by going backwards from its last product."""

    def __init__(
        self,
        graph: Graph,
        kept: frozenset[int],
        machine: Machine,
        backwards: Mapping[int, Backward],
    ) -> None:
        self.machine, self.backwards = machine, backwards
        gradients = {i for b in backwards.values() for i in b.taken}
        forward = [n for n in graph.nodes if n.id not in gradients]
        self.graph, self.private = graph, read_once(graph.with_nodes(forward), kept)
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

    def attention(self, product: Node, writes: Writes) -> tuple[Recognised, list[Node]] | None:
        """The attention that ends with this product, and the nodes that replace its ops: one
        attention node and, if needed, a transpose of its result. None if the product is not the end
        of an attention.
        """
        scores = self._scores(product)
        return None if scores is None else self._built(product, scores, writes)

    def _scores(self, product: Node) -> Recognised | None:
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
                weights = Weights(strict=node.type == "softmax")
                weights.backward = self.backwards.get(node.id)
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

    def _under(self, node: Node, weights: Weights) -> Tensor | None:
        """The scores on which `node` acts, if the node masks them; the mask is added to `weights`.
        None for any other node.
        """
        if not weights.causal and (known := self.masks.masked(node, weights.scale)) is not None:
            scores, weights.causal = known
            return scores
        read = self.masks.read(node, weights.scale)
        if read is None:
            return None
        scores, mask = read
        if weights.masks and {m.form for m in (mask, *weights.masks)} != {"added"}:
            return None
        weights.masks.append(mask)
        return scores

    def _product(self, node: Node, weights: Weights, taken: list[int]) -> Recognised | None:
        """The attention whose scores this product computes. If queries and keys are multiplied by
        constants before, the constants become part of the scores' factor. None if the product does
        not compute scores.
        """
        given, scale = node.read(MatmulAttributes), weights.scale
        if given.finish or given.transpose_a:
            return None
        sides, read = [], []
        for side in node.inputs:
            read.append(self.places[node.id])
            maker = self.maker(side)
            plain = weights.backward is None
            if plain and maker is not None and maker.type == "mul" and len(maker.inputs) == 1:
                (start,) = maker.inputs
                same = start.shape == side.shape
                seen = start if same else in_shape(start, side.shape, named=True)
                if seen is not None:
                    scale *= float(maker.elementwise.scalar or 0.0)
                    read[-1] = self.places[maker.id]
                    side = seen
            sides.append(side)
        if not 0.0 < scale < math.inf:
            return None
        flipped = not given.transpose_b
        return Recognised(sides[0], sides[1], flipped, scale, weights, taken, tuple(read))

    def _built(
        self, product: Node, scores: Recognised, writes: Writes
    ) -> tuple[Recognised, list[Node]] | None:
        out, value = product.outputs[0], product.inputs[1]
        tensors = (scores.query, scores.key, value)
        backward = scores.weights.backward
        if not scores.followed(self.graph, product, tensors):
            return None
        rank, width = len(out.shape), out.shape[-1]
        leads = {t.shape[:-2] for t in (*tensors, out)}
        for tensor, read in zip(tensors[:2], scores.read, strict=True):
            if writes.last.get(tensor.buffer.id, (-1, None))[0] >= read:
                return None
        for mask in scores.weights.masks:
            last = writes.last.get(mask.tensor.buffer.id, (-1, None))[0]
            if last >= self.places[mask.reader.id]:
                return None
        if rank < 2 or len(leads) != 1 or len({t.dtype for t in (*tensors, out)}) != 1:
            return None
        lead = tuple(range(rank - 2))
        turned = (False, scores.flipped, product.read(MatmulAttributes).transpose_b)
        for operands, group in [(tensors, 1)] if backward else self._forms(tensors, turned, writes):
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
        """The tensors (query, key, value) that the new op may read. There may be several choices,
        the preferred one first. Each choice comes with the number of query heads that share a head
        of keys and values. If heads of keys and values were repeated, the first choice has keys and
        values without the repetition.
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
        """The operand of the new op as rows that hold all heads side by side. The elements may be
        in several places in memory, because transposes copy them. The first of `places` that has
        this layout is used. None if no place has it.
        """
        items = items_of(tensor)
        for place in places:
            rows = rows_of(place, heads, items_of(dataclasses.replace(tensor, buffer=place.buffer)))
            if rows is not None and items:
                return rows.tensor(self.graph, tensor, place)
        return None

    def _mask(
        self, product: Node, masks: Sequence[Mask], batch: int, heads: int
    ) -> tuple[list[Tensor], list[Node]] | None:
        """The attention's operand for the masks, in a list that is empty if there is no mask, and
        the nodes that add several masks. None if their layouts do not allow that.
        """
        total: list[Tensor] = []
        nodes: list[Node] = []
        for mask in masks:
            view = mask.by_head(batch, heads)
            if view is None:
                return None
            if total:
                try:
                    shape = np.broadcast_shapes(total[0].shape, view.shape)
                except ValueError:
                    return None
                result = self.graph.tensor(shape, mask.scores, name="attention.mask")
                inputs = (total[0], view)
                nodes.append(self._placed(product, "add", "attention.mask", inputs, result, {}))
                view = result
            total = [view]
        return total, nodes

    def _node(
        self, product: Node, scores: Recognised, operands: list[Tensor], heads: int
    ) -> list[Node] | None:
        out, width = product.outputs[0], product.outputs[0].shape[-1]
        query, weights = operands[0], scores.weights
        batch, rows = query.shape[:2]
        masked = self._mask(product, weights.masks, batch, heads)
        if masked is None or not whole(out):
            return None
        mask, before = masked
        first = weights.masks[0] if weights.masks else None
        attrs = AttentionAttributes(
            heads=heads,
            head_dim=width,
            scale=scores.scale,
            causal=weights.causal,
            placed=False,
            by_rows=True,
            mask=first.form if first else "",
            fill=first.fill if first else -math.inf,
            strict=weights.strict and bool(mask),
            logarithms=weights.backward is not None,
        )
        behind: list[Node] = []
        if heads == 1:
            result = self.graph.tensor(query.shape, out.dtype, buffer=out.buffer, name=out.name)
        else:
            result = self.graph.tensor(query.shape, out.dtype, name=out.name)
            by_row, by_head = (batch, rows, heads, width), (batch, heads, rows, width)
            source = self.graph.tensor(by_row, out.dtype, buffer=result.buffer, name=out.name)
            target = self.graph.tensor(by_head, out.dtype, buffer=out.buffer, name=out.name)
            turn = {"perm": [0, 2, 1, 3]}
            name = "attention.transpose"
            behind = [self._placed(product, "transpose", name, (source,), target, turn)]
        inputs = (*operands, *mask)
        attention = self._placed(product, "attention", "", inputs, result, attrs.to_node())
        attention = dataclasses.replace(attention, after=product.after)
        if weights.backward is not None:
            if not self.graph.view.steady(inputs, product, weights.backward.first):
                return None
            logarithms = self.graph.tensor((batch, rows, heads), fp32, name="attention.logarithms")
            attention = dataclasses.replace(attention, outputs=(result, logarithms))
        return [*before, attention, *behind] if attends(attention, self.machine) else None

    def next_id(self) -> int:
        """The id of a new node."""
        self.number += 1
        return self.number

    def _placed(
        self,
        product: Node,
        kind: str,
        name: str,
        inputs: tuple[Tensor, ...],
        output: Tensor,
        attrs: Mapping[str, Any],
    ) -> Node:
        """A new node that runs in the phase and on the processors of the attention's last product.
        kind: its type. name: "" for the type's name.
        """
        number = self.next_id()
        return product.beside(number, kind, inputs, output, attrs, name or kind, waits=False)
