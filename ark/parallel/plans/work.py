"""Computes each rank's share of a model's work under a plan, and finds the ops that several ranks
compute redundantly.

Work is counted as arithmetic: a matmul has two operations for each of its products, and any other
op has one for each element of its largest operand. Views have none. Called by
ark.parallel.plans.parallelize, and by `ark parallelize` for predictions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ark.errors import UnsupportedError
from ark.ir.graph import Node
from ark.parallel.plans.choices import Option, arithmetic
from ark.parallel.transform import ParallelGraph, Piece, annotate
from ark.parallel.transform.carried import VALUE
from ark.parallel.transform.normal import RESHAPE


@dataclass(frozen=True)
class Whole:
    """An op, or a part of one, that several ranks compute redundantly. share: its fraction of a
    single device's work. reason: why it is not split.
    """

    name: str
    type: str
    share: float
    reason: str


def work_of(node: Node) -> float:
    """The number of arithmetic operations of a node on one device."""
    return 0.0 if node.type == RESHAPE else arithmetic(node)


def shares(plan: ParallelGraph) -> tuple[float, ...]:
    """For each rank, its work as a fraction of a single device's work. It is 1 / ranks if the work
    is divided equally, and 1 if the rank computes everything.
    """
    done = [0.0] * plan.ranks
    for piece, work in _pieces(plan):
        for rank in plan.ranks_of(piece):
            done[rank] += work
    total = sum(map(work_of, plan.nodes)) or 1.0
    return tuple(work / total for work in done)


def whole(plan: ParallelGraph, mesh: Sequence[int]) -> tuple[Whole, ...]:
    """The ops that several ranks compute redundantly, the largest share first. mesh: the number of
    ranks along each axis.
    """
    total = sum(map(work_of, plan.nodes)) or 1.0
    several = [(p.node, work) for p, work in _pieces(plan) if len(plan.ranks_of(p)) > 1]
    return _sorted(several, total, mesh)


def whole_in(
    nodes: Sequence[Node], options: Mapping[int, Option], mesh: Sequence[int]
) -> tuple[float, tuple[Whole, ...]]:
    """Predicts the results of `shares` and `whole` for a plan that has not been built. Returns a
    rank's work as a fraction of a single device's, and the ops that no axis of the mesh splits.
    options: the chosen split of each node, by node id.
    """
    total = sum(map(work_of, nodes)) or 1.0
    done = 0.0
    several = []
    for node in nodes:
        choice = options[node.id].choice
        cut = [n for n, letter in zip(mesh, choice, strict=True) if letter not in (None, VALUE)]
        done += work_of(node) / math.prod(cut)
        if not any(choice) and math.prod(mesh) > 1:
            several.append((node, work_of(node)))
    return done / total, _sorted(several, total, mesh)


def _pieces(plan: ParallelGraph) -> Iterable[tuple[Piece, float]]:
    """All pieces, with their work."""
    for node in plan.nodes:
        for piece in plan.pieces(node):
            yield piece, work_of(node) * _fraction(piece)


def _fraction(piece: Piece) -> float:
    """The fraction of a node's work that one of its pieces does."""
    node, parts = piece.node, {}
    if piece.annotation is None:
        return 1.0
    tensors = (*node.inputs, node.outputs[0])
    views = (*piece.inputs, piece.output)
    for letters, tensor, view in zip(piece.annotation.operands, tensors, views, strict=True):
        for letter, own, size in zip(letters, view.shape, tensor.shape, strict=True):
            parts[letter] = own / size
    return math.prod(parts.values())


def _sorted(
    several: Sequence[tuple[Node, float]], total: float, mesh: Sequence[int]
) -> tuple[Whole, ...]:
    kept = [
        Whole(node.name, node.type, work / total, _reason(node, mesh))
        for node, work in several
        if work
    ]
    return tuple(sorted(kept, key=lambda one: -one.share))


def _reason(node: Node, mesh: Sequence[int]) -> str:
    try:
        annotation = annotate(node)
    except UnsupportedError as error:
        return str(error)
    sizes = annotation.sizes([t.shape for t in (*node.inputs, node.outputs[0])])
    cut = {n for letter, n in sizes.items() if n > 1 and letter not in annotation.frozen}
    axes = [ranks for ranks in mesh if ranks > 1]
    if cut and not any(size % ranks == 0 for size in cut for ranks in axes):
        listed = ", ".join(map(str, sorted(cut)))
        return (
            f"it can be cut along sizes {listed}, none divisible by {' or '.join(map(str, axes))}"
        )
    return "the plan leaves it whole"
