"""Fuses products that multiply one input by several weights into one product. Its weight is packed:
rows of the weights are concatenated or interleaved, so that values which the next op combines are
adjacent in the result. Two patterns of a decoder are rewritten. The products for query, key and
value, their biases, their rotary embedding and the appends to the caches become one product, one
bias and a `rope_kv` node. The two products of a gated activation become one product and a node that
reads pairs of columns. Listed in ark.lower.passes before fuse_linear, which fuses the product with
its neighbours.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from ark.ir.attributes import (
    AttentionAttributes,
    MatmulAttributes,
    NormAttributes,
    PagedAppendAttributes,
    ProjectionAttributes,
    RotaryAttributes,
)
from ark.ir.dtype import RowType, fp32
from ark.ir.epilogues import GATED_PAIRS
from ark.ir.graph import Graph, Node
from ark.ir.packing import Packing, Part
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.makers import only_makers
from ark.lower.rewrite.views import same_elements, whole
from ark.lower.tiling import divided_bytes, divides
from ark.machine import Machine


@dataclass
class _Match:
    """One place in the graph where weights can be packed. products: the matmuls. others: further
    nodes that are removed. rewrite: a function of the packed product's result that returns the new
    nodes, by the id of the node whose position each takes; its second argument is the packed
    norms. biases: the bias of each product, packed as the weights are; empty if there are none.
    norms: the weights of the norms of queries' and keys' heads, packed as the weights are; empty if
    there are none.
    """

    products: list[Node]
    others: list[Node]
    pairs: tuple[int, ...]
    interleave: bool
    rewrite: Callable[[Tensor, Tensor | None], dict[int, Node]]
    biases: Sequence[Tensor] = ()
    norms: Sequence[Tensor] = ()

    @property
    def members(self) -> list[Node]:
        return sorted((*self.products, *self.others), key=lambda n: n.id)

    @property
    def key(self) -> tuple[object, ...]:
        """A key of the weights and the way in which they are packed. If several matches share a
        weight, the weight is packed only if all of them have the same key.
        """
        packed = (*self.weights, *self.biases, *self.norms)
        return (tuple(t.buffer.id for t in packed), self.pairs, self.interleave)

    @property
    def weights(self) -> list[Tensor]:
        return [n.inputs[1] for n in self.products]


class _Finder:
    """Finds the nodes whose weights can be packed. kept: ids of buffers that are accessed from
    outside of the graph.
    """

    def __init__(self, graph: Graph, kept: frozenset[int], machine: Machine) -> None:
        self.graph, self.kept, self.machine = graph, kept, machine
        self.view, self.makers = graph.view, only_makers(graph)
        self.written = {b for n in graph.nodes for b in writes(n)}

    def maker(self, type: str, tensor: Tensor) -> Node | None:
        """The node that computes the tensor, if the node has the type `type` and its result has a
        single reader, which reads the tensor; None otherwise.
        """
        node = self.source(type, tensor)
        return node if node is not None and node.outputs[0].id == tensor.id else None

    def source(self, type: str, tensor: Tensor) -> Node | None:
        """The result of `maker`, or a node whose result has another shape than the tensor."""
        node, buffer = self.makers.get(tensor.buffer.id), tensor.buffer
        if node is None or node.type != type or node.hints is not None:
            return None
        alone = self.view.reads[buffer.id] == 1 and buffer.id not in self.kept
        return node if alone and same_elements(tensor, node.outputs[0]) else None

    def append(self, type: str, tensor: Tensor) -> Node | None:
        """The node of this type that appends rows to a cache, if its result has a single reader;
        None otherwise.
        """
        node = self.view.makers.get(tensor.id)
        alone = self.view.uses[tensor.id] == 1 and tensor.buffer.id not in self.kept
        plain = node is not None and node.type == type and node.hints is None
        return node if plain and alone else None

    def normed(self, rotations: Sequence[Node], width: int) -> list[Node]:
        """The norms of single heads whose results these nodes rotate; empty unless each rotation
        has such a norm, with a weight that can be packed.
        """
        sources = [self.source("rmsnorm", rotation.inputs[0]) for rotation in rotations]
        norms = [n for n in sources if n is not None]
        if len(norms) < len(sources):
            return []
        epsilons = {n.read(NormAttributes).eps for n in norms}
        weights = [n.inputs[1] for n in norms]
        alike = len(epsilons) == len({w.dtype for w in weights}) == 1 and min(epsilons) > 0
        fits = all(n.outputs[0].shape[-1] == width and n.outputs[0].dtype == fp32 for n in norms)
        own = all(w.shape == (width,) and self.may_be_packed(w) for w in weights)
        apart = weights[0].buffer.id != weights[1].buffer.id
        return norms if alike and fits and own and apart else []

    def product(self, tensor: Tensor) -> Node | None:
        """The product with a weight that computes the tensor, if the tensor has a single reader and
        the weight can be packed; None otherwise.
        """
        node = self.maker("matmul", tensor) or self.source("matmul", tensor)
        if node is None or node.read(MatmulAttributes).transposes != (False, True):
            return None
        weight, tensor = node.inputs[1], node.outputs[0]
        fits = len(weight.shape) == len(tensor.shape) == 2 and tensor.dtype == fp32
        return node if fits and self.may_be_packed(weight) else None

    def may_be_packed(self, given: Tensor) -> bool:
        """True for a whole parameter that may be stored in another order."""
        own = given.buffer.arena == "parameter" and given.buffer.id not in self.kept
        return whole(given) and own and given.buffer.id not in self.written

    def biased(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Node], list[Tensor]]:
        """Separates biases from tensors. Returns the tensors before the biases are added, the nodes
        that add the biases, and the biases. If not every tensor is a sum with a parameter of one
        row of fp32, the tensors are returned unchanged with empty lists.
        """
        adds, sums, biases = [self.maker("add", t) for t in tensors], [], []
        for add in adds:
            if add is None or len(add.inputs) != 2:
                return list(tensors), [], []
            given = sorted(add.inputs, key=lambda t: len(t.shape))
            bias, summed = given
            fits = bias.shape == summed.shape[-1:] and summed.shape == add.outputs[0].shape
            if not fits or bias.dtype != fp32 or not self.may_be_packed(bias):
                return list(tensors), [], []
            sums.append(summed)
            biases.append(bias)
        return sums, [n for n in adds if n is not None], biases

    def products(self, tensors: Sequence[Tensor]) -> list[Node] | None:
        """The products that compute the tensors, if all have the same input and weights of one
        type; None otherwise.
        """
        products = [self.product(t) for t in tensors]
        nodes = [n for n in products if n is not None]
        if len(nodes) < len(products) or len({n.inputs[1].buffer.id for n in nodes}) < len(nodes):
            return None
        kinds = {(n.inputs[0].id, n.inputs[1].dtype.name, *n.placement) for n in nodes}
        return nodes if len(kinds) == 1 else None

    def gated(self, node: Node) -> _Match | None:
        """The match for a gated activation whose inputs are products of the same x with the weights
        `gate` and `up`; None for any other node.
        """
        products = self.products(node.inputs)
        if products is None or products[0].inputs[1].shape != products[1].inputs[1].shape:
            return None
        if [p.outputs[0].id for p in products] != [t.id for t in node.inputs]:
            return None  # read in another shape

        def rewrite(product: Tensor, _: Tensor | None) -> dict[int, Node]:
            pairs = dataclasses.replace(node, type=GATED_PAIRS[node.type], inputs=(product,))
            return {node.id: pairs}

        return self.movable(_Match(products, [node], (0, 0), True, rewrite))

    def attention(self, node: Node) -> _Match | None:
        """The match for an attention node whose query, keys and values are products of the same
        input, with rotated query and keys and with keys and values appended to caches; None for any
        other node.
        """
        paged = node.type == "paged_attention"
        attention = node.read(AttentionAttributes)
        usual = structs.replace(attention, window=0, sinks=False).plain
        count = 4 + paged
        if len(node.inputs) != count + attention.sinks or not usual:
            return None
        query, keys, values, *table, position = node.inputs[:count]
        if query.dtype != fp32:
            return None
        appends = [self.append("paged_append" if paged else "kv_append", t) for t in (keys, values)]
        if appends[0] is None or appends[1] is None:
            return None
        key, value = appends[0], appends[1]
        if isinstance(keys.dtype, RowType):  # rows of quantised caches are written as a whole
            return None
        if paged and not key.inputs[1].id == value.inputs[1].id == table[0].id:
            return None
        apart = not paged or all(a.read(PagedAppendAttributes).apart for a in (key, value))
        rotations = [self.maker("rotary_embedding", t) for t in (query, key.inputs[0])]
        if rotations[0] is None or rotations[1] is None:
            return None
        first, second = rotations[0], rotations[1]
        norms = self.normed([first, second], attention.head_dim)
        starts = [node.inputs[0] for node in norms or (first, second)]
        sums, adds, biases = self.biased([*starts, value.inputs[0]])
        products = self.products(sums)
        same = first.inputs[1:] == second.inputs[1:] and first.attrs == second.attrs
        positions = (
            key.inputs[-2],
            value.inputs[-2],
        )  # the last inputs of an append are position and cache
        places = {t.id for t in (position, first.inputs[1], *positions)}
        if products is None or not same or len(places) > 1:
            return None
        frequencies, caches = first.inputs[2], (key.inputs[-1], value.inputs[-1])
        rotation = first.read(RotaryAttributes)
        width = attention.head_dim
        if rotation.head_dim != width or caches[0].buffer.id == caches[1].buffer.id:
            return None
        rows = query.shape[0]

        def rewrite(product: Tensor, weights: Tensor | None) -> dict[int, Node]:
            sequences = position.shape[0]
            kv_heads = keys.shape[1] if paged else keys.shape[0] // sequences
            sizes = ProjectionAttributes(
                heads=attention.heads,
                kv_heads=kv_heads,
                head_dim=width,
                head_eps=norms[0].read(NormAttributes).eps if norms else 0.0,
            )
            scaled = () if weights is None else (weights,)
            end = max((first, second, key, value), key=lambda n: n.id)
            outputs, inputs = [query], [query, *caches, *table, position, *node.inputs[count:]]
            # If each row belongs to another sequence, attention also reads the newest keys and
            # values as a tensor, so that it need not wait until they are in the caches.
            splits = attention.plain if paged else divides(attention, self.machine)
            splits = splits and divided_bytes(node) <= self.machine.task_bytes
            if rows == sequences and splits and apart:
                name = f"{node.name}.newest"
                newest = self.graph.tensor((rows, 2 * kv_heads * width), fp32, name=name)
                outputs.append(newest)
                inputs.append(newest)
            joined = dataclasses.replace(
                end,
                type="rope_kv",
                name=_joined([node.name])[0] + "rope_kv",
                inputs=(product, position, frequencies, *caches, *table, *scaled),
                outputs=tuple(outputs),
                attrs=sizes.to_node(),
                after=_after([*norms, first, second, key, value]),
            )
            return {end.id: joined, node.id: dataclasses.replace(node, inputs=tuple(inputs))}

        pairs = 0 if rotation.interleaved else width
        others = [*adds, *norms, first, second, key, value]
        weights = [norm.inputs[1] for norm in norms]
        match = _Match(products, others, (pairs, pairs, 0), False, rewrite, biases, weights)
        return self.movable(match)

    def movable(self, match: _Match) -> _Match | None:
        """The match, if no node between its first and last node prevents computing all of it at the
        position of the last; None otherwise.
        """
        members = match.members
        inside = {n.id for n in members}
        reads = {t.buffer.id for n in members for t in n.inputs}
        changed = {b for n in members for b in writes(n)}
        for node in self.graph.nodes:
            if members[0].id < node.id < members[-1].id and node.id not in inside:
                theirs = set(writes(node))
                if theirs & (reads | changed) or {t.buffer.id for t in node.inputs} & changed:
                    return None
        return match


def pack_weights(graph: Graph, context: Context) -> Graph:
    """A copy of the graph with packed weights. The new graph's `packings` describes how the data of
    each packed weight is put together from the model's parameters.
    """
    kept = context.kept
    finder = _Finder(graph, kept, context.machine)
    matches: dict[tuple[object, ...], list[_Match]] = {}
    readers = graph.view.reading
    for node in graph.nodes:
        match = None
        if node.hints is not None:
            continue
        if node.type in GATED_PAIRS:
            match = finder.gated(node)
        elif node.type in ("attention", "paged_attention"):
            match = finder.attention(node)
        if match is not None:
            matches.setdefault(match.key, []).append(match)
    replaced: dict[int, Node | None] = {}
    packings = []
    for group in matches.values():
        if not _agreed(readers, group):
            continue
        packed: list[Tensor | None] = []
        for tensors in (group[0].weights, group[0].biases, group[0].norms):
            if not tensors:
                packed.append(None)
                continue
            packing = _packing(group[0], tensors)
            packings.append(packing)
            shape = (sum(t.shape[0] for t in tensors), *tensors[0].shape[1:])
            dtype = tensors[0].dtype
            packed.append(graph.tensor(shape, dtype, arena="parameter", name=packing.name))
        weight, bias, norms = packed
        assert weight is not None
        for match in group:
            replaced.update(_replace(graph, match, weight, bias, norms))
    nodes = (replaced.get(n.id, n) for n in graph.nodes)
    result = graph.with_nodes(n for n in nodes if n is not None)
    result.packings = (*graph.packings, *packings)
    return result


def _agreed(readers: Mapping[int, set[int]], group: Sequence[_Match]) -> bool:
    """True if only the nodes of these matches read the packed tensors, so that these can be stored
    in packed form only. readers: ids of the nodes that read each buffer.
    """
    members = {n.id for match in group for n in match.members}
    packed = (*group[0].weights, *group[0].biases, *group[0].norms)
    return all(readers[t.buffer.id] <= members for t in packed)


def _packing(match: _Match, tensors: Sequence[Tensor]) -> Packing:
    names = [t.buffer.name for t in tensors]
    prefix, stems = _joined(names)
    # There is no norm of values, the last of the products.
    parts = tuple(Part(name, pairs) for name, pairs in zip(names, match.pairs, strict=False))
    return Packing(prefix + "+".join(stems), parts, match.interleave)


def _replace(
    graph: Graph, match: _Match, weight: Tensor, bias: Tensor | None, norms: Tensor | None
) -> dict[int, Node | None]:
    """The replacements for a match's nodes, by node id; a node with replacement None is removed."""
    members = match.members
    prefix, stems = _joined([n.name for n in match.products])
    first = match.products[0]
    shape = (first.outputs[0].shape[0], weight.shape[0])
    name = prefix + "+".join(stems)
    product = graph.tensor(shape, fp32, name=name)
    replaced: dict[int, Node | None] = {n.id: None for n in members}
    place = members[-2]
    summed = product
    if bias is not None:
        summed = graph.tensor(shape, fp32, name=f"{name}.biased")
        operands = (product, bias)
        replaced[place.id] = first.beside(place.id, "add", operands, summed, {}, name, waits=False)
        place = members[-3]
    replaced.update(match.rewrite(summed, norms))
    replaced[place.id] = dataclasses.replace(
        first,
        id=place.id,
        name=name,
        inputs=(first.inputs[0], weight),
        outputs=(product,),
        after=_after(match.products),
    )
    return replaced


def writes(node: Node) -> list[int]:
    """Ids of all buffers that a node writes: its outputs, and the caches among its inputs to which
    rope_kv appends (as a node or as a product's epilogue).
    """
    caches: tuple[Tensor, ...] = ()
    if node.type == "rope_kv":
        caches = node.inputs[3:5]
    elif node.type == "matmul" and node.read(MatmulAttributes).rope_kv is not None:
        caches = node.inputs[4:6]
    return [t.buffer.id for t in (*node.outputs, *caches)]


def _after(nodes: Sequence[Node]) -> tuple[Tensor, ...]:
    return tuple(itertools.chain.from_iterable(n.after for n in nodes))


def _joined(names: Sequence[str]) -> tuple[str, list[str]]:
    """The prefix of module names that all names have in common, and the rest of each name."""
    folders = zip(*(n.split(".")[:-1] for n in names), strict=False)
    common = itertools.takewhile(lambda parts: len(set(parts)) == 1, folders)
    prefix = "".join(f"{parts[0]}." for parts in common)
    return prefix, [n[len(prefix) :] for n in names]
