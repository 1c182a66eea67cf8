"""Cases and helpers of tests/unit/parallel/plans/test_coconet.py, which other tests use too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ark
from ark.frontend.model import Model, use_model
from ark.ir.graph import Graph, Node
from ark.parallel import ParallelGraph, spread
from ark.parallel.plans import coconet

ROWS, WIDTH, RANKS = 8, 12, 4


def update(kind: str) -> Graph:
    """Returns an optimizer step on one device: the gradient is a product that sums over rows, and
    the state and the weights are updated by it. kind: momentum, adam or LAMB.
    """
    model = Model(0, 1)
    with use_model(model):
        x, y = ark.tensor((ROWS, WIDTH), name="x"), ark.tensor((ROWS, 16), name="y")
        weight, state = ark.parameter((16, WIDTH), name="w"), ark.tensor((16, WIDTH), name="state")
        gradient = ark.matmul(y, x, transpose_input=True, name="gradient")
        if kind == "momentum":
            held = ark.add(ark.mul(state, 2.0), gradient, output=state)
            ark.copy(ark.sub(weight, held), output=weight)
        elif kind == "adam":
            square = ark.tensor((16, WIDTH), name="square")
            mean = ark.add(ark.mul(state, 0.9), ark.mul(gradient, 0.1), output=state)
            wide = ark.mul(ark.mul(gradient, gradient), 0.01)
            second = ark.add(ark.mul(square, 0.99), wide, output=square)
            moved = ark.div(mean, ark.add(ark.sqrt(second), 1.0))
            ark.copy(ark.sub(weight, moved), output=weight)
        else:  # LAMB: the step is scaled by the ratio of the norms of weight and update
            moved = ark.add(ark.mul(state, 0.9), gradient, output=state)

            def norm(t: Any) -> Any:
                return ark.sqrt(ark.reduce_sum(ark.reduce_sum(ark.mul(t, t), 1), 0))

            trust = ark.div(norm(weight), ark.add(norm(moved), 1.0))
            ark.copy(ark.sub(weight, ark.mul(moved, trust)), output=weight)
    return model.graph


def named(plan: ParallelGraph, name: str) -> Node:
    return next(n for n in plan.nodes if n.name == name)


def started(kind: str) -> ParallelGraph:
    graph = update(kind)
    plan = ParallelGraph(graph, RANKS)
    names = {t.name: t.buffer.name for t in graph.tensors}
    spread({names["x"]: 0, names["y"]: 0})(plan)
    return plan


def nothing(plan: ParallelGraph) -> None:
    """The untransformed program: an all-reduce, then every rank computes the whole update."""


def scattered(plan: ParallelGraph) -> None:
    """Splits the all-reduce: a reduce-scatter and an all-gather, then every rank computes the whole
    update.
    """
    coconet.split(plan, named(plan, "gradient"))


def reordered(plan: ParallelGraph) -> None:
    """Moves the update before the all-gather: a reduce-scatter, the update of each rank's slice
    (with its slice of the moments), an all-gather.
    """
    parts = coconet.split(plan, named(plan, "gradient"))
    reads, chosen = {parts.outputs[0].buffer.id}, []
    for node in plan.nodes:
        if any(t.buffer.id in reads for t in node.inputs):
            chosen.append(node)
            reads.add(node.outputs[0].buffer.id)
    coconet.reorder(plan, parts, chosen)
    for name in {t.buffer.name for t in plan.graph.tensors if t.name in ("state", "square")}:
        coconet.as_slice(plan, name)


WAYS: dict[str, Callable[[ParallelGraph], None]] = {
    "AR-compute": nothing,
    "RS-AG-compute": scattered,
    "RS-compute-AG": reordered,
}


def product() -> ParallelGraph:
    """Returns x weight^T with k split over the ranks, followed by a relu on all ranks."""
    model = Model(0, 1)
    with use_model(model):
        result = ark.linear(
            ark.tensor((ROWS, WIDTH), name="x"), ark.parameter((16, WIDTH)), name="product"
        )
        ark.copy(ark.relu(result, name="relu"), output=ark.tensor((ROWS, 16), name="result"))
    plan = ParallelGraph(model.graph, RANKS)
    for node in plan.nodes:
        (piece,) = plan.pieces(node)
        if node.name != "product":
            plan.op_assign(piece, *range(RANKS))
            continue
        for rank, part in enumerate(plan.op_trans(piece, "z", RANKS)):
            plan.op_assign(part, rank)
    return plan
