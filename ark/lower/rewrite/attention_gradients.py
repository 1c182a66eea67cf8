"""Recognises the gradient of attention that is written as single ops, which one op replaces
(ark.lower.rewrite.attention_backward). With the weights p = softmax(scores) and the result o = p v,
these ops are

dv = p^T do, dp = do v^T, ds = p * (dp - sum(p * dp)), dq = scale ds k, dk = scale ds^T q

The sum of a row of p * dp equals that of do * o, which needs no scores. Called by
ark.lower.rewrite.fuse_attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ark.ir.attributes import (
    MatmulAttributes,
    ReduceAttributes,
)
from ark.ir.dtype import FLOATS
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.makers import only_makers
from ark.lower.rewrite.views import same_elements, whole

SCALE_ERROR = 1e-6  # relative difference up to which two scales count as equal

Selected = tuple[int, int]  # the buffer of a mask; the branch of `where` that has the scores


@dataclass(frozen=True)
class Backward:
    """The ops that compute the gradients of one attention. given: the gradient of the result.
    query, key, value: the operands that they read. scale: the factor between the gradients of the
    masked scores and those of the product. masks: the masks that select elements of the gradient.
    results: the gradients of query, key and value. taken: the ids of the ops. first: the op that
    runs first.
    """

    given: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    masks: frozenset[Selected]
    results: tuple[Tensor, Tensor, Tensor]
    taken: frozenset[int]
    first: Node

    def belongs(
        self, product: Node, tensors: Sequence[Tensor], scale: float, nodes: Iterable[Node]
    ) -> bool:
        """True if these are the gradients of the attention with these queries, keys and values.
        product: its last product. nodes: its ops.
        """
        pairs = zip((self.query, self.key, self.value), tensors, strict=True)
        own = frozenset(selected(n) for n in nodes if n.type == "where" and len(n.inputs) == 2)
        return (
            all(same_elements(a, b) for a, b in pairs)
            and abs(self.scale - scale) <= SCALE_ERROR * scale
            and own == self.masks
            and same_shape(self.given, product.outputs[0])
            and self.first.placement == product.placement
        )


def same_shape(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and whole(one)


def selected(node: Node) -> Selected:
    """The mask of a `where` of two inputs, and the branch that is not a number."""
    tree: Any = node.elementwise.expr
    if not isinstance(tree, list) or len(tree) != 4 or tree[0] != "where":
        return -1, 0
    given = [t[0] == "input" for t in tree[1:]]
    if given not in ([True, True, False], [True, False, True]):
        return -1, 0
    return node.inputs[tree[1][1]].buffer.id, 1 if given[1] else 2


def backwards(graph: Graph, kept: frozenset[int]) -> dict[int, Backward]:
    """The gradients of attention in the graph, by the id of the softmax of the forward pass."""
    if not any(n.type == "matmul" and n.read(MatmulAttributes).transpose_a for n in graph.nodes):
        return {}
    search = _Search(graph, kept)
    matches = {
        n.id: search.backward(n) for n in graph.nodes if n.type in ("softmax", "safe_softmax")
    }
    return {number: match for number, match in matches.items() if match is not None}


class _Search:
    """Recognises gradients by going forwards from the softmax. A method returns None where the
    graph differs from the expected ops.
    """

    def __init__(self, graph: Graph, kept: frozenset[int]) -> None:
        self.graph, self.kept = graph, kept
        self.makers, self.places = only_makers(graph), graph.view.places
        self.nodes = {n.id: n for n in graph.nodes}

    def readers(self, tensor: Tensor) -> list[Node] | None:
        """The nodes that read a private tensor; None if the tensor is not private: it has several
        writers or readers outside of the graph, or is read in parts.
        """
        if tensor.buffer.id not in self.makers or tensor.buffer.id in self.kept:
            return None
        nodes = [self.nodes[i] for i in self.graph.view.reading[tensor.buffer.id]]
        for node in nodes:
            own = [t for t in node.inputs if t.buffer.id == tensor.buffer.id]
            if node.after or node.virtual or not all(same_elements(t, tensor) for t in own):
                return None
        return sorted(nodes, key=lambda n: self.places[n.id])

    def backward(self, softmax: Node) -> Backward | None:
        weights = softmax.outputs[0]
        read = self.readers(weights)
        if read is None or not weights.shape:
            return None
        casts = [n for n in read if n.type == "cast"]
        rounded = casts[0].outputs[0] if casts else weights
        products = [n for n in self.readers(rounded) or () if n.type == "matmul"]
        # One product is that of the forward pass, the other one is the gradient of the values.
        turned = [n for n in products if _form(n) == (True, False) and _reads(n, 0, rounded)]
        ahead = [n for n in products if n not in turned]
        rest = [n for n in read if n not in casts and n not in products]
        if len(casts) > 1 or len(turned) != 1 or len(ahead) != 1 or len(rest) != 2:
            return None
        if _form(ahead[0]) != (False, False) or (casts and len(products) != 2):
            return None
        value, given = ahead[0].inputs[1], turned[0].inputs[1]
        slopes = self._slopes(weights, rest)
        if slopes is None:
            return None
        sloped, wide, chain = slopes
        source = self._before_cast(wide, chain)
        if source is None or source.type != "matmul" or _form(source) != (False, True):
            return None
        chain.append(source)
        matches = same_elements(source.inputs[0], given) and same_elements(source.inputs[1], value)
        ended = self._ended(sloped, chain) if matches else None
        if ended is None:
            return None
        scale, masks, to_query, to_key = ended
        chain += [to_query, to_key, turned[0]]
        if any(n.placement != softmax.placement for n in chain):
            return None
        return Backward(
            given,
            to_key.inputs[1],
            to_query.inputs[1],
            value,
            scale,
            masks,
            (to_query.outputs[0], to_key.outputs[0], turned[0].outputs[0]),
            frozenset(n.id for n in chain),
            min(chain, key=lambda n: self.places[n.id]),
        )

    def _slopes(
        self, weights: Tensor, pair: list[Node]
    ) -> tuple[Tensor, Tensor, list[Node]] | None:
        """The gradient of the masked scores, that of the weights, and the ops that compute the
        former from the latter. pair: the two ops that read the weights.
        """
        for first, last in (pair, pair[::-1]):
            if len(first.inputs) != 2 or len(last.inputs) != 3 or first.hints or last.hints:
                continue
            at = next((i for i in (0, 1) if _reads(first, i, weights)), None)
            if at is None or sorted(_tree(first)[1:]) != [["input", 0], ["input", 1]]:
                continue
            wide, sums = first.inputs[1 - at], self.readers(first.outputs[0]) or []
            if _tree(first)[0] != "mul" or len(sums) != 1 or sums[0].type != "reduce_sum":
                continue
            reduced = sums[0].read(ReduceAttributes)
            total = sums[0].outputs[0]
            if reduced.axis != len(weights.shape) - 1 or reduced.term is not None:
                continue
            wanted = [weights, wide, total]
            places = [next((i for i in range(3) if _reads(last, i, t)), -1) for t in wanted]
            w, d, s = (["input", i] for i in places)
            fits = _tree(last) == ["mul", w, ["sub", d, s]]
            if fits and [n.id for n in self.readers(total) or ()] == [last.id]:
                return last.outputs[0], wide, [first, sums[0], last]
        return None

    def _before_cast(self, wide: Tensor, chain: list[Node]) -> Node | None:
        """The op that computes the gradient of the weights, before a cast. The readers of the
        gradient must be in `chain`.
        """
        known = {n.id for n in chain}
        read = self.readers(wide)
        if read is None or not {n.id for n in read} <= known:
            return None
        maker = self.makers[wide.buffer.id]
        if maker.type != "cast":
            return maker
        chain.append(maker)
        source = maker.inputs[0]
        if [n.id for n in self.readers(source) or ()] != [maker.id]:
            return None
        return self.makers[source.buffer.id]

    def _ended(
        self, sloped: Tensor, chain: list[Node]
    ) -> tuple[float, frozenset[Selected], Node, Node] | None:
        """From the gradient of the masked scores on: the scale and the masks, and the products that
        compute the gradients of queries and keys.
        """
        scale, masks, at = 1.0, set[Selected](), sloped
        while True:
            read = self.readers(at)
            if read is None:
                return None
            if len(read) == 2:
                break
            (node,) = read if len(read) == 1 else (None,)
            if node is None or node.hints or len(node.outputs) != 1:
                return None
            tree = _tree(node)
            if node.type == "cast" and node.outputs[0].dtype in FLOATS:
                pass
            elif tree[0] in ("mul", "div") and len(tree) == 3 and tree[1] == ["input", 0]:
                if len(node.inputs) != 1 or tree[2][0] != "number" or not tree[2][1] > 0.0:
                    return None
                by = float(tree[2][1])
                scale = scale * by if tree[0] == "mul" else scale / by
            elif tree[0] == "where" and len(node.inputs) == 2 and selected(node)[1]:
                if ["number", 0] not in tree[2:] and ["number", 0.0] not in tree[2:]:
                    return None
                masks.add(selected(node))
            else:
                return None
            chain.append(node)
            at = node.outputs[0]
        plain = [n for n in read if n.type == "matmul" and _form(n) == (False, False)]
        turned = [n for n in read if n.type == "matmul" and _form(n) == (True, False)]
        if len(plain) != 1 or len(turned) != 1 or not math.isfinite(scale):
            return None
        if not _reads(plain[0], 0, at) or not _reads(turned[0], 0, at):
            return None
        return scale, frozenset(masks), plain[0], turned[0]


def _form(node: Node) -> tuple[bool, bool] | None:
    """Which operands of a plain product are transposed; None if the product has an epilogue."""
    given = node.read(MatmulAttributes)
    return None if given.finish or given.windows or node.hints else given.transposes


def _reads(node: Node, place: int, tensor: Tensor) -> bool:
    return same_elements(node.inputs[place], tensor)


def _tree(node: Node) -> list[Any]:
    """The expression of an elementwise node; [""] for other nodes."""
    given = node.elementwise
    if isinstance(given.expr, list):
        return given.expr
    if node.type in ("mul", "div"):
        others = [["number", given.scalar]] if given.scalar is not None else []
        return [node.type, *(["input", i] for i in range(len(node.inputs))), *others]
    return [""]
