"""Independent small ops are reordered so that they run concurrently; results stay the same."""

from __future__ import annotations

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.cli.measure.cases import lstm
from ark.cli.measure.ops import planned
from ark.frontend.model import Model, use_model
from ark.lower.prepare import prepare
from ark.lower.rewrite import reorder_small_ops
from ark.lower.rewrite.context import Context
from ark.plan.cost import predict
from tests.programs import build, contents, reference

H100 = registry.get("cuda").machine("h100")
ON_H100 = Context(H100, machines=(H100,))


@pytest.mark.parametrize("seed", range(60))
def test_reordered_program_computes_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reorder_small_ops, "MIN_MEAN_CONCURRENT_OPS", 0)  # chains too
    model = Model()
    with use_model(model):
        inputs, _ = build(seed, 24)
    graph, first = model.graph, contents(inputs, seed)
    reordered = reorder_small_ops.reorder_small_ops(graph, ON_H100)
    want, got = reference(graph, first), reference(reordered, first)
    for key, image in want.items():
        np.testing.assert_array_equal(got[key], image)


def test_random_programs_change_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reorder_small_ops, "MIN_MEAN_CONCURRENT_OPS", 0)
    changed = 0
    for seed in range(60):
        model = Model()
        with use_model(model):
            build(seed, 24)
        graph = model.graph
        changed += reorder_small_ops.reorder_small_ops(graph, ON_H100) is not graph
    assert changed > 30


def test_cells_of_a_diagonal_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells of an LSTM of 10 layers and 8 steps that lie on one diagonal (layer + step) run
    concurrently: it takes 17 rounds. In program order, cells would wait that could run.
    """
    case = lstm(10, 8, 256)
    plan, _ = planned(case, H100)
    monkeypatch.setattr(reorder_small_ops, "MIN_MEAN_CONCURRENT_OPS", 1 << 20)
    before, _ = planned(case, H100)
    ends = [max(s.end for s in predict(p, 0)) for p in (before, plan)]
    assert ends[1] < 0.5 * ends[0]


def test_chain_keeps_its_order() -> None:
    model = Model()
    with use_model(model):
        a = ark.tensor([4096])
        for _ in range(8):
            a = ark.relu(ark.add(a, a))
    prepared = prepare(model.graph, H100)
    assert not prepared.reordered
