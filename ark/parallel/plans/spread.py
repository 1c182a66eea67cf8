"""Plans that are derived from the cuts of a few tensors: data and tensor parallelism, ZeRO,
experts.

The caller gives the cuts of a few tensors, from which the splits of all ops follow: if an operand
of an op is cut along a dimension (a letter), the op is split along it, and its result is cut in the
same way. This is the sharding propagation of GSPMD (Xu et al. 2021), executed by op_trans. If the
op sums over the letter, its result is partial sums, and the next reader reads the sum. Called by
ark.parallel.plans.by_name and by users.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ark.errors import InvalidUsageError, UnsupportedError
from ark.ir.graph import Node
from ark.parallel.plans.pipelined import ends
from ark.parallel.transform import ParallelGraph, Piece, annotate


def spread(
    cuts: Mapping[str, int],
    parts: int = 1,
    among: Callable[[Node], bool] = lambda node: True,
) -> Callable[[ParallelGraph], None]:
    """A plan for `parallelize` over all ranks along one axis.

    cuts: the tensors that are cut over the ranks: for each buffer name (`tensor.ir.buffer.name`),
    the dimension along which it is cut. For data parallelism these are the tensors that differ
    between examples, along the batch; for tensor parallelism the parameters and their optimizer
    state; for ZeRO 1 and 2 the batch and the optimizer's state (gradients are then reduced in
    parts); for ZeRO 3 also the parameters, if the model reads them by `ark.copy`. parts: the number
    of pieces of a rank, which it computes one after the other through a layer (co-shard). among:
    returns True for the nodes that the plan splits; others are left unchanged.

    The plan raises InvalidUsageError for names that the graph does not read, and for dimensions
    that are not divisible by the number of ranks.

    Examples:
        >>> with ark.use_model(ark.Model(0, 1)) as model:
        ...     x = ark.tensor([8, 16])
        ...     y = ark.linear(x, ark.tensor([32, 16]))
        >>> by_rows = ark.parallel.spread({x.ir.buffer.name: 0})
        >>> [g.nodes[0].outputs[0].shape for g in ark.parallelize(model, 2, by_rows).ranks.graphs]
        [(4, 32), (4, 32)]
    """

    def plan(graph: ParallelGraph) -> None:
        cut = seeds(graph, cuts, graph.ranks, f"over {graph.ranks} ranks")
        count = graph.ranks * parts
        for node in filter(among, graph.nodes):
            (whole,) = graph.pieces(node)
            pieces = split_along(graph, whole, cut, (count, graph.ranks))
            if not pieces:
                graph.op_assign(whole, *range(graph.ranks))
                continue
            for number, piece in enumerate(pieces):
                graph.op_assign(piece, number * graph.ranks // len(pieces))
        if parts > 1:
            _in_turn(graph, among, parts)

    return plan


def _in_turn(graph: ParallelGraph, among: Callable[[Node], bool], parts: int) -> None:
    """Orders the parts of a layer so that a rank computes them one after the other.

    Some values join the parts, such as a sum over a batch; they are computed after all parts. Ops
    that depend on such a value are ordered only among themselves. So a part of an op before the
    joining value never waits for a part of an op after it.
    """
    joins = _joins(graph)
    count = graph.ranks * parts
    groups: dict[tuple[str, int, int], list[list[Piece]]] = {}
    for node in filter(among, graph.nodes):
        pieces = graph.pieces(node)
        if len(pieces) != count:
            continue
        for number, piece in enumerate(pieces):
            rank, part = divmod(number, parts)
            key = (_layer(node), rank, joins[node.id])
            groups.setdefault(key, [[] for _ in range(parts)])[part].append(piece)
    for own in groups.values():
        for before, after in itertools.pairwise(own):
            for first, then in itertools.product(ends(before, True), ends(after, False)):
                graph.op_order(first, then)


def _joins(graph: ParallelGraph) -> dict[int, int]:
    """For each node, the largest number of values that join parts (such as sums over a batch) on a
    path from an input to the node. The node's own result is included.
    """
    joins: dict[int, int] = {}
    writers: dict[int, Node] = {}
    # The nodes that read a tensor's value of the previous iteration, by phase.
    readers: dict[tuple[int, int], list[Node]] = {}
    for node in graph.nodes:
        level = 0
        pieces = graph.pieces(node)
        for at, tensor in enumerate(node.inputs):
            readers.setdefault((tensor.buffer.id, node.phase), []).append(node)
            writer = writers.get(tensor.buffer.id)
            if writer is None:
                continue
            written = graph.pieces(writer)
            views = [(i, p.inputs[at]) for i, p in enumerate(pieces)]
            apart = len(written) == len(pieces) and all(
                i == j or not any(w.meets(view) for w in piece.written)
                for i, view in views
                for j, piece in enumerate(written)
            )
            level = max(level, joins[writer.id] + (len(written) > 1 and not apart))
        for tensor in node.outputs:
            key = graph.versions.get(tensor.buffer.id, (-1, 0))
            level = max([level, *(joins[r.id] for r in readers.get(key, ()) if r.id in joins)])
            writers[tensor.buffer.id] = node
        joins[node.id] = level
    return joins


def _layer(node: Node) -> str:
    """The scopes in a node's name, up to the first one that contains a number."""
    scopes = node.name.split(".")[:-1]
    numbered = [i for i, scope in enumerate(scopes) if any(c.isdigit() for c in scope)]
    return ".".join(scopes[: numbered[0] + 1] if numbered else scopes)


def seeds(graph: ParallelGraph, cuts: Mapping[str, int], count: int, among: str) -> dict[int, int]:
    """For each buffer, the number of the dimension along which it is cut. Raises InvalidUsageError
    for a tensor that cannot be cut along its dimension. count: the number of parts. among: what the
    parts are for, as text for errors.
    """
    written = {n.outputs[0].buffer.id for n in graph.nodes}
    read = {t.buffer.id: t for n in graph.nodes for t in n.inputs if t.buffer.id not in written}
    dimension_of = {}
    for name, dimension in cuts.items():
        named = [t for t in read.values() if t.buffer.name == name]
        if not named:
            raise InvalidUsageError(f"the graph has no input named {name!r}")
        for tensor in named:
            extents = tensor.extents
            if not 0 <= dimension < len(extents) or extents[dimension] % count:
                raise InvalidUsageError(
                    f"{name} of shape {list(extents)} cannot be cut along dimension {dimension} "
                    f"{among}; use a dimension divisible by {count}"
                )
            dimension_of[tensor.buffer.id] = dimension
    return dimension_of


def split_along(
    graph: ParallelGraph, piece: Piece, cut: dict[int, int], counts: Sequence[int]
) -> list[Piece]:
    """Splits a piece along the letter along which its operands are cut. The number of parts is the
    first of `counts` that divides the letter's size. If none does, the piece stays whole and the
    result is empty.

    cut: for each buffer, the dimension along which it is cut. The node's results are added to it.
    """
    node = piece.node
    letter = next((x for x in (_letter(node, cut, n) for n in counts) if x), None)
    if letter is None:
        return []
    count = next(n for n in counts if _letter(node, cut, n) == letter)
    assert piece.annotation is not None
    result = piece.annotation.operands[-1]
    if letter in result:
        for tensor in node.outputs:
            cut[tensor.buffer.id] = result.index(letter)
    return graph.op_trans(piece, letter, count)


def _letter(node: Node, cut: Mapping[int, int], count: int) -> str | None:
    """The letter along which most elements of a node's operands are cut; None if there is none."""
    try:
        annotation = annotate(node)
    except UnsupportedError:
        return None
    sizes = annotation.sizes([t.shape for t in (*node.inputs, node.outputs[0])])
    votes: Counter[str] = Counter()
    for tensor, letters in zip(node.inputs, annotation.operands, strict=False):
        if tensor.buffer.id in cut:
            letter = letters[cut[tensor.buffer.id]]
            if letter != "1" and letter not in annotation.frozen and sizes[letter] % count == 0:
                votes[letter] += tensor.elements
    return max(sorted(votes), key=lambda v: votes[v]) if votes else None
