"""Pipelines of graphs without scopes: stages, micro-batches and their order on ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ark
from ark.errors import BaseError, InvalidUsageError, ModelError, UnsupportedError
from ark.frontend.model import Model, use_model
from ark.ir.graph import Graph
from ark.parallel import parallelize
from tests.cases.training_models import Step, step_of

ROWS, WIDTH, LAYERS = 8, 64, 4


def perceptron(normalised: bool = False, layers: int = LAYERS) -> tuple[Graph, str]:
    """Returns a training step of a perceptron without scopes, and the name of the batch's buffer.

    normalised: every activation is divided by its sum over the batch.
    """
    model = Model(0, 1)
    with use_model(model):
        x = ark.tensor([ROWS, WIDTH])
        weights = [ark.parameter([WIDTH, WIDTH]) for _ in range(layers)]
        h: Any = x
        for weight in weights:
            h = ark.relu(ark.matmul(h, weight))
            h = ark.div(h, ark.reduce_sum(h, 0)) if normalised else h
        loss = ark.reduce_sum(ark.reduce_sum(h * h, 1), 0)
        ark.optim.SGD(weights, 0.1).step(ark.grad(ark.reshape(loss, [1]), weights))
    return model.graph, x.ir.buffer.name


def rows_of(graph: Graph, split: Any, rank: int, type: str) -> list[int]:
    """The ops of a type are split by rows. Returns the first row of each part that a rank computes,
    in the order in which it computes them.
    """
    order = [p for p in split.plan.in_order() if split.plan.ranks_of(p) == [rank]]
    return [p.output.box[0][0] for p in order if p.node.type == type]


def test_stages_are_equal_and_hold_their_own_parameters() -> None:
    graph, x = perceptron()
    split = parallelize(graph, 2, "1f1b", cuts={x: 0}, micro_batches=4)
    held = [sum(view.shape == (WIDTH, WIDTH) for view in h.values()) for h in split.ranks.held]
    assert held == [2, 2]
    np.testing.assert_allclose(split.work, 0.5, atol=0.05)
    kinds = [n.type for graph in split.ranks.graphs for n in graph.nodes]
    assert "all_reduce" not in kinds and kinds.count("send") == kinds.count("recv") == 8


@pytest.mark.parametrize(("plan", "between"), [("1f1b", True), ("gpipe", False)])
def test_micro_batches_run_in_the_order_of_the_schedule(plan: str, between: bool) -> None:
    """On the last rank, 1F1B runs the first micro-batch's backward pass before the second's forward
    pass. GPipe runs it after all forward passes.
    """
    graph, x = perceptron()
    split = parallelize(graph, 2, plan, cuts={x: 0}, micro_batches=4)
    order = [p for p in split.plan.in_order() if split.plan.ranks_of(p) == [1]]
    forward = [i for i, p in enumerate(order) if p.node.type == "relu"]
    undone = set(graph.undone)
    backward = [i for i, p in enumerate(order) if p.output.buffer in undone]
    assert len(forward) == 2 * 4
    assert (min(backward) < max(forward)) == between
    assert rows_of(graph, split, 1, "relu") == [0, 0, 2, 2, 4, 4, 6, 6]


def test_gradients_belong_to_the_stage_of_their_op() -> None:
    graph, x = perceptron()
    split = parallelize(graph, 4, "1f1b", cuts={x: 0})
    writer = {n.outputs[0].buffer.id: n for n in split.plan.nodes}
    for buffer, forward in graph.undone.items():
        (stage,) = {r for p in split.plan.pieces(writer[forward]) for r in split.plan.ranks_of(p)}
        for piece in split.plan.pieces(writer[buffer]):
            assert split.plan.ranks_of(piece) == [stage]


def test_interlaced_shares_the_embedding() -> None:
    step: Step = step_of("Llama", 2)
    split = parallelize(step.graph, 2, "interlaced", cuts=step.cuts)
    lookups = [
        [n.outputs[0].shape for n in graph.nodes if n.type == "embedding"]
        for graph in split.ranks.graphs
    ]
    assert lookups == [[(6, 4, 6)] * 4] * 2  # a quarter of 24 texts, a half of 12 columns


@pytest.mark.parametrize(
    ("plan", "how", "error", "says"),
    [
        ("1f1b", {"normalised": True}, UnsupportedError, "is computed from all examples"),
        ("1f1b", {"count": 3}, InvalidUsageError, "into 3 micro-batches"),
        ("1f1b", {"count": 0}, InvalidUsageError, "use a positive number"),
        ("chimera", {"count": 1}, InvalidUsageError, "use a positive even number"),
        ("1f1b", {"cuts": {}, "count": 4}, InvalidUsageError, "name the tensors that hold it"),
        ("3f1b", {}, ModelError, "this graph has 1"),
        ("data", {"count": 4}, InvalidUsageError, "micro_batches is for pipelines"),
        ("1f1b", {"layers": 1, "ranks": 9}, InvalidUsageError, "needs as many blocks"),
    ],
)
def test_unfit_graphs_and_numbers_are_refused(
    plan: str, how: dict[str, Any], error: type[BaseError], says: str
) -> None:
    graph, x = perceptron(how.get("normalised", False), how.get("layers", LAYERS))
    ranks, cuts = how.get("ranks", 2), how.get("cuts", {x: 0})
    with pytest.raises(error, match=says):
        parallelize(graph, ranks, plan, cuts=cuts, micro_batches=how.get("count"))


def test_one_micro_batch_may_read_all_examples() -> None:
    graph, x = perceptron(normalised=True)
    split = parallelize(graph, 2, "1f1b", cuts={x: 0}, micro_batches=1)
    assert max(split.work) < 0.7
