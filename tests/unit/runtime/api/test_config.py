"""The effect of a planner context's or a config rule's configuration on the plan."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest

import ark
from ark.backend import registry
from ark.plan.types import Plan, PlanOp


@pytest.fixture(autouse=True)
def fresh() -> None:
    ark.init()


def planned(machine: str = "cpu-4") -> Plan:
    inner_plan = ark.Planner(machine=registry.machine(machine)).plan().inner
    assert inner_plan is not None
    return inner_plan


def coords(plan: Plan, op: int = 0) -> list[tuple[int, ...]]:
    listed = (t for phase in plan.phases for own in phase.processors for t in own)
    return sorted(t.coord for t in listed if t.op == op)


def ops(plan: Plan) -> list[PlanOp]:
    """Returns the plan's ops except the iteration's end."""
    return [op for op in plan.ops if op.kind != "iteration_end"]


def tensor(*shape: int, dtype: ark.DataType = ark.fp32) -> ark.Tensor:
    return ark.tensor(list(shape), dtype)


# By op: a function that calls it, the tile requested, and the expected first indices of its tasks.
OPS: dict[str, tuple[Callable[[], Any], list[int], list[range]]] = {
    "add": (lambda: ark.add(tensor(64, 96), 1.0), [16, 32], [range(0, 64, 16), range(0, 96, 32)]),
    "broadcast": (
        lambda: ark.mul(tensor(64, 96), tensor(64, 1)),
        [1, 96],
        [range(64), range(1)],
    ),
    "ragged": (lambda: ark.exp(tensor(10, 96)), [4, 40], [range(0, 10, 4), range(0, 96, 40)]),
    "clipped": (lambda: ark.exp(tensor(10, 96)), [64, 48], [range(1), range(0, 96, 48)]),
    "leading ones": (lambda: ark.exp(tensor(10, 96)), [1, 1, 5, 96], [range(0, 10, 5), range(1)]),
    "cast": (lambda: ark.cast(tensor(8, 8), ark.fp16), [2, 8], [range(0, 8, 2), range(1)]),
    "matmul": (
        lambda: ark.matmul(tensor(64, 32), tensor(32, 96)),
        [32, 48],
        [range(0, 64, 32), range(0, 96, 48)],
    ),
    "transpose": (
        lambda: ark.transpose(tensor(64, 96), [1, 0]),
        [48, 16],
        [range(0, 96, 48), range(0, 64, 16)],
    ),
    "rope": (
        lambda: ark.rope(tensor(8, 16), tensor(8, 16)),
        [2, 8],
        [range(0, 8, 2), range(0, 16, 8)],
    ),
    "embedding": (
        lambda: ark.embedding(ark.tensor([2, 3], ark.int32), tensor(8, 64)),
        [1, 1, 16],
        [range(6), range(0, 64, 16)],
    ),
    "reduce": (lambda: ark.reduce_sum(tensor(12, 96), 1), [3, 1], [range(0, 12, 3), range(1)]),
    "reduce columns": (
        lambda: ark.reduce_max(tensor(12, 96), 0),
        [1, 32],
        [range(1), range(0, 96, 32)],
    ),
    "reduce away": (
        lambda: ark.reduce_sum(tensor(12, 6, 96), 1, keepdims=False),
        [4, 48],
        [range(0, 12, 4), range(1), range(0, 96, 48)],
    ),
    "softmax": (lambda: ark.softmax(tensor(12, 96)), [3, 96], [range(0, 12, 3), range(1)]),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("machine", ["cpu-4", "h100", "mi300x"])
def test_tasks_have_the_configured_tile(name: str, machine: str) -> None:
    call, tile, expected = OPS[name]
    with ark.PlannerContext(config={"Tile": tile}):
        call()
    coordinates = coords(planned(machine))
    grid = [tuple(c) for c in coordinates]
    firsts = [sorted({c[-len(expected) :][d] for c in grid}) for d in range(len(expected))]
    if name != "softmax":
        assert firsts == [list(r) for r in expected]
    assert len(grid) == math.prod(len(r) for r in expected)
    assert len(ops(planned(machine))) == 1


def test_product_shapes_and_inner_contexts_come_first() -> None:
    with ark.PlannerContext(config={"Tile": [8, 8], "TileShapeMNK": [32, 16, 64], "NumWarps": 4}):
        ark.matmul(tensor(64, 32), tensor(32, 64))
        with ark.PlannerContext(config={"Tile": [64, 32]}):
            ark.exp(tensor(64, 64))
    plan = planned()
    assert len(coords(plan, 0)) == 2 * 4 and len(coords(plan, 1)) == 2


@pytest.mark.parametrize("tasks", [1, 2, 3, 7, 24, 64])
def test_num_tasks_sets_the_number_of_tasks(tasks: int) -> None:
    with ark.PlannerContext(config={"NumTasks": tasks}):
        ark.exp(tensor(8 * 3 * 7 * 8, 12))
        ark.softmax(tensor(8 * 3 * 7 * 8, 12))
    plan = planned()
    assert len(coords(plan, 0)) == len(coords(plan, 1)) == tasks


@pytest.mark.parametrize("granularity", [1, 2, 5])
def test_granularity_assigns_consecutive_tasks_to_a_processor(granularity: int) -> None:
    with ark.PlannerContext(
        processor_range=[1, 4], config={"Tile": [1, 8], "Granularity": granularity}
    ):
        ark.exp(tensor(11, 8))
    for processor, own in enumerate(planned().phases[0].processors):
        rows = [t.coord[2] for t in own if t.op == 0]
        assert rows == [r for r in range(11) if 1 + r // granularity % 3 == processor]


def test_implementation_asked_for_reduces_in_one_step() -> None:
    ark.reduce_sum(tensor(1, 1 << 20), 1)
    assert len(ops(planned("h100"))) == 2
    ark.init()
    with ark.PlannerContext(config={"ImplType": "WarpWise"}):
        ark.reduce_sum(tensor(1, 1 << 20), 1)
    assert len(ops(planned("h100"))) == 1


def test_ops_of_other_tiles_are_not_joined() -> None:
    x = tensor(64, 64)
    with ark.PlannerContext(config={"Tile": [8, 64]}):
        y = ark.relu(ark.exp(x))
    with ark.PlannerContext(config={"Tile": [16, 64]}):
        y = ark.sqrt(y)
    ark.PlannerContext._stack.clear()
    plan = planned()
    assert [len(coords(plan, op.id)) for op in ops(plan)][-1] == 4
    assert all(op.params["tile"][2] in (8, 16) for op in ops(plan))
    del y


@pytest.mark.parametrize(
    ("config", "call", "words"),
    [
        ({"Tile": [2, 8]}, lambda: ark.softmax(tensor(4, 16)), "part of a row of 16"),
        ({"Tile": [2, 2, 8]}, lambda: ark.exp(tensor(4, 16)), "more dimensions than"),
        ({"Tile": [2, 8, 8]}, lambda: ark.matmul(tensor(4, 8, 8), tensor(8, 8)), "one by one"),
        ({"Tile": [2, 16], "NumTasks": 3}, lambda: ark.exp(tensor(4, 16)), "tiles of .* are 2"),
        ({"NumTasks": 17}, lambda: ark.exp(tensor(4, 16)), "NumTasks=17"),
        (
            {"Tile": [1, 8]},
            lambda: ark.attention(
                tensor(1, 32), tensor(2, 16, 16), tensor(2, 16, 16), ark.tensor([1], ark.int32)
            ),
            "Tile and NumTasks are not supported",
        ),
    ],
)  # fmt: skip
def test_unsatisfiable_configs_are_refused(config: Any, call: Any, words: str) -> None:
    with ark.PlannerContext(config=config):
        call()
    with pytest.raises(ark.PlanError, match=words):
        planned()


def test_contexts_without_sync_are_one_group() -> None:
    a = tensor(64, 64)
    with ark.PlannerContext(sync=False):
        for _ in range(2):
            with ark.PlannerContext():
                ark.exp(a)
    ark.exp(a)
    plan = ark.Planner(machine=registry.machine("cpu-4")).plan()
    assert [len(g["ResourceGroups"][0]["TaskGroups"]) for g in plan.processor_groups] == [2, 1]
    reread = ark.Plan.from_str(str(plan))
    assert reread.processor_groups == plan.processor_groups


def test_config_rules_apply_outside_of_contexts(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    x = tensor(64, 64)
    ark.add(x, 1.0)
    with ark.PlannerContext(config={"Tile": [32, 64]}):
        ark.exp(x)
    planner = ark.Planner(machine=registry.machine("cpu-4"))
    seen = []

    def broken(op: str, arch: str) -> str:
        raise RuntimeError("mine")

    def rule(op: str, arch: str) -> str:
        seen.append((json.loads(op)["Type"], arch))
        return json.dumps({"NumWarps": 1, "Tile": [8, 64]})

    planner.install_config_rule(broken)
    planner.install_config_rule(lambda op, arch: "")
    planner.install_config_rule(rule)
    planner.install_config_rule(lambda op, arch: '{"Tile": [1, 1]}')
    with caplog.at_level(logging.WARNING):
        plan = planner.plan().inner
    assert plan is not None
    assert [len(coords(plan, op.id)) for op in ops(plan)] == [8, 2]
    assert [kind for kind, _ in seen] == ["Add"]
    assert "mine" in caplog.text + capsys.readouterr().err
    wrong = ark.Planner(machine=registry.machine("cpu-4"))
    wrong.install_config_rule(lambda op, arch: '{"Tiles": 3}')
    with pytest.raises(ark.InvalidUsageError, match="Tiles"):
        wrong.plan()
    with pytest.raises(ark.InvalidUsageError, match="is a function"):
        wrong.install_config_rule("rule")
