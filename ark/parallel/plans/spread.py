"""Plans that follow from the cuts of a few tensors: data and tensor parallelism, ZeRO, experts.

Each op is cut along the letter along which an operand arrives cut, and passes its result on in that
form (the sharding propagation of GSPMD, Xu et al. 2021, on op_trans). If the letter is summed over,
the result is partial sums, and its next reader reads the sum.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping

from ark.errors import InvalidUsageError, UnsupportedError
from ark.ir.graph import Node
from ark.parallel.plans.pipelined import ends
from ark.parallel.transform import ParallelGraph, Piece, annotate


def spread(
    cuts: Mapping[str, int],
    parts: int = 1,
    among: Callable[[Node], bool] = lambda node: True,
) -> Callable[[ParallelGraph], None]:
    """A plan for `parallelize`: all ranks along one axis, `cuts` lists the tensors that are cut
    over them.

    cuts: for each buffer name (`tensor.ir.buffer.name`) the dimension along which it is cut. Data
    parallelism: the tensors that differ between examples, along the batch. Tensor parallelism:
    parameters, and the optimizer's state for them. ZeRO 1 and 2: the batch, and the optimizer's
    state (gradients are then reduced in parts). ZeRO 3: also the parameters, where the model reads
    them by `ark.copy`. parts: pieces of a rank, which it computes one after the other through a
    layer (co-shard). among: the nodes of the plan; others are left unchanged.

    The plan raises InvalidUsageError for names that the graph does not read, and dimensions that
    are not divisible by the number of ranks.
    """

    def plan(graph: ParallelGraph) -> None:
        cut = _seeds(graph, cuts)
        pieces: dict[tuple[str, int], dict[int, list[Piece]]] = {}
        all_ranks, count = range(graph.ranks), graph.ranks * parts
        for node in filter(among, graph.nodes):
            (whole,) = graph.pieces(node)
            letter = _letter(node, cut, count) or _letter(node, cut, graph.ranks)
            if letter is None:
                graph.op_assign(whole, *all_ranks)
                continue
            fine = count if _letter(node, cut, count) == letter else graph.ranks
            for number, piece in enumerate(graph.op_trans(whole, letter, fine)):
                rank, part = divmod(number, fine // graph.ranks)
                graph.op_assign(piece, rank)
                pieces.setdefault((_layer(node), rank), {}).setdefault(part, []).append(piece)
            assert whole.annotation is not None
            result = whole.annotation.operands[-1]
            if letter in result:
                for tensor in node.outputs:
                    cut[tensor.buffer.id] = result.index(letter)
        for own in pieces.values():
            for before, after in itertools.pairwise(own[part] for part in sorted(own)):
                for first, then in itertools.product(ends(before, True), ends(after, False)):
                    graph.op_order(first, then)

    return plan


def _layer(node: Node) -> str:
    """A node's scopes up to the first that has a number."""
    scopes = node.name.split(".")[:-1]
    numbered = [i for i, scope in enumerate(scopes) if any(c.isdigit() for c in scope)]
    return ".".join(scopes[: numbered[0] + 1] if numbered else scopes)


def _seeds(graph: ParallelGraph, cuts: Mapping[str, int]) -> dict[int, int]:
    """The dimension by buffer; raises InvalidUsageError for tensors that cannot be cut along it."""
    written = {n.outputs[0].buffer.id for n in graph.nodes}
    read = {t.buffer.id: t for n in graph.nodes for t in n.inputs if t.buffer.id not in written}
    dimension_of = {}
    for name, dimension in cuts.items():
        named = [t for t in read.values() if t.buffer.name == name]
        if not named:
            raise InvalidUsageError(f"the graph has no input named {name!r}")
        for tensor in named:
            extents = tensor.extents
            if not 0 <= dimension < len(extents) or extents[dimension] % graph.ranks:
                raise InvalidUsageError(
                    f"{name} of shape {list(extents)} cannot be cut along dimension {dimension} "
                    f"over {graph.ranks} ranks; use a dimension divisible by {graph.ranks}"
                )
            dimension_of[tensor.buffer.id] = dimension
    return dimension_of


def _letter(node: Node, cut: Mapping[int, int], ranks: int) -> str | None:
    """The letter along which most elements of a node's operands arrive cut, or None."""
    try:
        annotation = annotate(node)
    except UnsupportedError:
        return None
    sizes = annotation.sizes([t.shape for t in (*node.inputs, node.outputs[0])])
    votes: Counter[str] = Counter()
    for tensor, letters in zip(node.inputs, annotation.operands, strict=False):
        if tensor.buffer.id in cut:
            letter = letters[cut[tensor.buffer.id]]
            if letter != "1" and letter not in annotation.frozen and sizes[letter] % ranks == 0:
                votes[letter] += tensor.elements
    return max(sorted(votes), key=lambda v: votes[v]) if votes else None
