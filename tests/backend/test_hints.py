"""A configuration of an op (`ark.hint`) changes its tile sizes; results stay equal to NumPy's."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import ark
from tests.slow import slow

pytestmark = pytest.mark.emulated("slow")

SEED = np.random.default_rng(5)
TILES = [[1, 1], [1, 7], [3, 40], [5, 64], [16, 96], [40, 96]]
FEW = [[3, 40], [16, 96]]  # the tiles of `nox`


def random_input(*shape: int) -> tuple[ark.Tensor, np.ndarray]:
    values = SEED.standard_normal(shape).astype(np.float32)
    return ark.tensor(list(shape)), values


def ran(results: list[ark.Tensor], *inputs: tuple[ark.Tensor, np.ndarray]) -> list[np.ndarray]:
    with ark.Runtime() as runtime:
        runtime.launch()
        for tensor, values in inputs:
            tensor.from_numpy(values)
        runtime.run()
        return [r.to_numpy() for r in results]


@pytest.mark.parametrize(
    "tile", [pytest.param(t, marks=[slow] * (t not in FEW)) for t in TILES], ids=str
)
def test_any_tile_gives_the_same_result(backend: str, tile: list[int]) -> None:
    x, b = random_input(40, 96), random_input(96, 96)
    row = random_input(40, 1)
    with ark.PlannerContext(config={"Tile": tile, "NumWarps": 1, "SramBytes": 0}):
        results = [
            ark.gelu(ark.add(x[0], 1.0)),
            ark.mul(x[0], row[0]),
            ark.matmul(x[0], b[0]),
            ark.rope(x[0], x[0]),
        ]
    with ark.PlannerContext(config={"Tile": [*tile[:1], 1]}):
        results.append(ark.reduce_sum(x[0], 1))
    with ark.PlannerContext(config={"Tile": [1, tile[1]]}):
        results.append(ark.reduce_max(x[0], 0))
    with ark.PlannerContext(config={"Tile": [tile[0], 96], "Granularity": 2}):
        results.append(ark.softmax(x[0]))
    with ark.PlannerContext(config={"Tile": tile[::-1]}):
        results.append(ark.transpose(x[0], [1, 0]))
    outputs = ran(results, x, b, row)
    v = x[1].astype(np.float64)
    e = np.exp(v - v.max(1, keepdims=True))
    pairs = v[:, 0::2] + 1j * v[:, 1::2]
    rotated = np.stack([(pairs**2).real, (pairs**2).imag], -1).reshape(40, 96)
    w = v + 1
    wanted = [
        0.5 * w * (1 + np.tanh(np.sqrt(2 / np.pi) * (w + 0.044715 * w**3))),
        v * row[1],
        v @ b[1].astype(np.float64),
        rotated,
        v.sum(1, keepdims=True),
        v.max(0, keepdims=True),
        e / e.sum(1, keepdims=True),
        v.T,
    ]
    for got, expected in zip(outputs, wanted, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("config", [{"NumTasks": 5}, {"NumTasks": 20, "Granularity": 3}])
def test_any_number_of_tasks_gives_the_same_result(backend: str, config: dict[str, Any]) -> None:
    x = random_input(40, 30)
    with ark.PlannerContext(config=config):
        results = [ark.exp(x[0]), ark.layernorm(x[0])]
    outputs = ran(results, x)
    v = x[1].astype(np.float64)
    normed = (v - v.mean(1, keepdims=True)) / np.sqrt(v.var(1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(outputs[0], np.exp(v), rtol=1e-5)
    np.testing.assert_allclose(outputs[1], normed, rtol=1e-4, atol=1e-5)


def test_config_rules_change_the_plan_that_runs(backend: str) -> None:
    x = random_input(24, 64)
    y = ark.matmul(ark.relu(x[0]), x[0], transpose_other=True)
    planner = ark.Planner()
    tiles = {"Relu": [4, 32], "Matmul": [8, 12]}
    planner.install_config_rule(
        lambda op, arch: json.dumps({"Tile": tiles[json.loads(op)["Type"]]})
    )
    plan = planner.plan()
    assert [t["Ops"][0]["Config"]["NumTasks"] for t in plan.task_infos] == [12, 6]
    with ark.Runtime() as runtime:
        runtime.launch(plan=plan)
        x[0].from_numpy(x[1])
        runtime.run()
        product = y.to_numpy()
    v = x[1].astype(np.float64)
    np.testing.assert_allclose(product, np.maximum(v, 0) @ v.T, rtol=1e-4, atol=1e-4)
