"""Plans in ARK's own layout run on the memory of the model for which they were made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import ark
from tests.task_plans import COLUMNS, OUT, ROWS, norm_and_product

RNG = np.random.default_rng(11)
X = RNG.standard_normal((1, ROWS, COLUMNS)).astype(np.float16)
W = RNG.standard_normal((COLUMNS, OUT)).astype(np.float32)


def expected() -> np.ndarray:
    x = X.astype(np.float64)
    return x / (x * x).mean(2, keepdims=True) @ W


def model() -> tuple[ark.Tensor, ark.Tensor, ark.Tensor]:
    """Builds the model for which the plan of `norm_and_product` was written."""
    x, w = ark.tensor([1, ROWS, COLUMNS], ark.fp16), ark.tensor([COLUMNS, OUT])
    wide = ark.cast(x, ark.fp32)
    mean = ark.reduce_mean(ark.mul(wide, wide), axis=2)
    return x, w, ark.matmul(ark.div(wide, mean), w)


def test_plan_of_arks_runs(backend: str, tmp_path: Path) -> None:
    x, w, y = model()
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(norm_and_product()))
    plan = ark.Plan.from_file(path)
    assert (plan.num_processors, plan.num_warps_per_processor) == (2, 8)
    assert [t["Id"] for t in plan.task_infos] == [0, 3, 6]
    with ark.Runtime() as runtime:
        runtime.launch(plan=plan)
        x.from_numpy(X)
        w.from_numpy(W)
        runtime.run(3)
        np.testing.assert_allclose(y.to_numpy(), expected(), rtol=1e-4, atol=1e-4)
        assert ark.Runtime.last_plan is not None
        inner = ark.Runtime.last_plan.inner
    assert inner is not None
    tasks = [(p, t) for p, own in enumerate(inner.phases[0].processors) for t in own]
    by_op = {
        op.id: [(p, t) for p, t in tasks if t.op == op.id]
        for op in inner.ops
        if op.kind != "iteration_end"
    }
    assert [len(v) for v in by_op.values()] == [ROWS, ROWS, ROWS, 6, 3]
    assert {p for p, _ in by_op[3]} == {1} and {p for p, _ in by_op[4]} == {0, 1}
    assert [p for p, t in sorted(by_op[0], key=lambda e: e[1].coord)][:8] == [0] * 7 + [1]


def test_plan_runs_on_tensors_of_its_numbers(backend: str) -> None:
    """A plan runs in a model with other ops, and uses the tensors whose numbers the plan
    contains.
    """
    data = norm_and_product()
    x, w = ark.tensor([1, ROWS, COLUMNS], ark.fp16), ark.tensor([COLUMNS, OUT])
    y = ark.tensor([1, ROWS, OUT])
    ours = {9: x.ir.id, 0: w.ir.id, 19: y.ir.id}
    for task in data["TaskInfos"]:
        for op in task["Ops"]:
            for entry in (*op["ReadTensors"], *op["WriteTensors"], *op["ResultTensors"]):
                entry["Id"] = ours.get(entry["Id"], 1000 + entry["Id"])
    with ark.Runtime() as runtime:
        runtime.launch(plan=ark.Plan(data))
        x.from_numpy(X)
        w.from_numpy(W)
        runtime.run()
        np.testing.assert_allclose(y.to_numpy(), expected(), rtol=1e-4, atol=1e-4)
