"""Random programs over overlapping views: the plan computes the result of program order in any
order of tasks that it permits, and the verifier accepts it.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ark
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.lower import tiling
from ark.lower.pipeline import plan as make_plan
from ark.plan.verify import verify
from tests.programs import build, contents, interpret, reference
from tests.slow import examples

relaxed = settings(
    max_examples=examples(300),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@given(
    seed=st.integers(0, 2**32 - 1),
    processors=st.sampled_from([1, 2, 3, 5]),
    tile=st.sampled_from([8, 32, 2048]),
    steps=st.integers(1, 14),
    iterations=st.integers(1, 2),
)
@relaxed
def test_any_order_that_a_plan_allows_is_program_order(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    processors: int,
    tile: int,
    steps: int,
    iterations: int,
) -> None:
    monkeypatch.setattr(tiling, "least_elements", lambda _: tile)
    model = Model(0, 1)
    with use_model(model):
        inputs, held = build(seed, steps)
    options = {"external": sorted(model.storages.keys()), "packets": False}
    plan = make_plan(model.graph, registry.machine(f"cpu-{processors}"), options)
    verify([plan])
    first = contents(inputs, seed)
    wanted = reference(model.graph, first, iterations)
    names = {b.name: b.id for b in model.graph.buffers}
    named = {b.name: first[b.id] for b in model.graph.buffers if b.id in first}
    got = interpret(plan, named, seed, iterations)
    lasting = {b.name for b in plan.buffers if b.initial}
    assert {t.ir.buffer.name for t in held} & set(got) <= lasting
    for name in sorted(lasting):
        want = wanted[names[name]]
        scale = max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(got[name] / scale, want / scale, rtol=1e-4, atol=1e-5)


# Linear layers, and how their weights are expected to be streamed: (input rows, columns of fp32
# weights, rows of a stage, stages of a row). 0 rows: they are not streamed.
STREAMED = [
    (1, 1024, 4, 1),
    (1, 4096, 1, 1),
    (1, 8192, 1, 2),
    (1, 14336, 1, 7),
    (2, 4096, 1, 1),
    (2, 8192, 0, 0),
    (1, 8200, 0, 0),
    (1, 70000, 0, 0),
    (1, 512 * 34, 0, 0),
]


@pytest.mark.parametrize(("rows", "columns", "stage_rows", "split_k"), STREAMED)
def test_weights_are_streamed_only_in_stages_that_the_ring_holds(
    rows: int, columns: int, stage_rows: int, split_k: int
) -> None:
    """A stage holds rows or an equal part of a row. If no stage can hold either, a plain product
    reads the weights.
    """
    machine = registry.machine("h100")
    assert machine.ring_bytes and machine.stage_bytes < 70000 * 4
    model = Model(0, 1)
    with use_model(model):
        x, weight = ark.tensor([rows, columns]), ark.parameter([8, columns])
        ark.matmul(x, weight, transpose_other=True)
    plan = make_plan(model.graph, machine)
    verify([plan])
    op = plan.ops[0]
    assert op.kind == ("linear" if split_k else "matmul")
    if split_k:
        assert (op.params["rows"], op.params["split_k"]) == (stage_rows, split_k)
        stages = {f.stage for t in plan.phases[0].processors for i in t for f in i.fetches}
        assert stages == {columns * 4 * stage_rows // split_k}
