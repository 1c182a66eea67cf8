"""Parameters of a task kind by name: from the lowering to the plan, and from there to the kind."""

from __future__ import annotations

import ark
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan
from ark.plan import kind
from ark.tasks.experts import TopKParams


def test_a_plan_holds_parameters_without_defaults() -> None:
    assert list(TopKParams(k=3, rows=1).to_plan().items()) == [("k", 3), ("rows", 1)]
    params = TopKParams(k=3, least=True, rows=2).to_plan()
    assert list(params.items()) == [("k", 3), ("least", True), ("rows", 2)]


def test_a_kind_reads_them_back() -> None:
    model = Model()
    with use_model(model):
        x = ark.tensor([8, 64], ark.fp32)
        ark.topk(x, 3)
        ark.topk(x, 5, largest=False)
    planned = plan(model.graph, registry.machine("cpu-2"))
    signatures = [kind.signature(planned, op) for op in planned.ops if op.kind == "topk"]
    expected = [TopKParams(k=3, rows=4), TopKParams(k=5, least=True, rows=4)]
    assert [sig.read(TopKParams) for sig in signatures] == expected
    assert signatures[0].read(TopKParams) is signatures[0].read(TopKParams)
