"""Training steps whose ops are list scheduled: sums of gradients and updates run while ops of the
backward pass wait for each other.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import ark
from ark.backend import registry
from ark.ir.dtype import bf16, fp32
from ark.ir.graph import Graph
from ark.lower import pipeline
from ark.lower.pipeline import plan
from ark.plan.cost import phase_us
from ark.plan.types import Plan
from ark.plan.verify import verify

ROWS, WIDTH, LAYERS = 512, 1536, 5


def step(train: bool = True) -> Graph:
    """A training step of a chain of products, or its forward pass."""
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.tensor([ROWS, WIDTH], bf16)
        weights = [ark.parameter([WIDTH, WIDTH], bf16) for _ in range(LAYERS)]
        for weight in weights:
            x = ark.relu(ark.matmul(ark.layernorm(x), weight))
        if train:
            loss = ark.reduce_mean(ark.reshape(ark.cast(x, fp32), [1, ROWS * WIDTH]), 1)
            ark.optim.AdamW(weights).step(ark.grad(loss, weights))
    return model.graph


def planned(graph: Graph, **options: Any) -> Plan:
    task_plan = plan(graph, registry.machine("h200"), options)
    verify([task_plan])
    return task_plan


def order(task_plan: Plan) -> list[str]:
    return [op.kind for op in task_plan.ops]


def before_last_product(task_plan: Plan) -> list[str]:
    kinds = order(task_plan)
    return kinds[: len(kinds) - kinds[::-1].index("matmul")]


@pytest.fixture(name="program_order")
def in_program_order(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The plan of the training step without list scheduling."""
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "list_scheduled", lambda groups, machine: None)
        return planned(step())


def tasks(task_plan: Plan) -> Counter[object]:
    """For each op, by name, the tiles of its tasks."""
    lists = (task for listed in task_plan.phases[0].processors for task in listed)
    return Counter((task_plan.ops[t.op].name, task_plan.ops[t.op].kind, t.coord) for t in lists)


def test_updates_run_during_the_backward_pass(program_order: Plan) -> None:
    listed = planned(step())
    assert tasks(listed) == tasks(program_order)
    assert phase_us(listed, 0) < 0.95 * phase_us(program_order, 0)
    assert "fusion" in before_last_product(listed)
    assert "fusion" not in before_last_product(program_order)


def test_limit_of_activations_keeps_program_order(program_order: Plan) -> None:
    assert order(planned(step(), activation_bytes=1 << 30)) == order(program_order)


def test_forward_pass_keeps_program_order(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = planned(step(train=False))
    monkeypatch.setattr(pipeline, "list_scheduled", lambda groups, machine: None)
    assert planned(step(train=False)) == listed


def test_memory_is_not_used_again_by_the_next_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next ops would wait until the last reader has ended."""
    monkeypatch.setattr(pipeline, "LAG_OPS", 0)
    without = planned(step())
    monkeypatch.undo()
    assert planned(step()).arenas["activation"] > without.arenas["activation"]


def test_sums_for_updates_have_few_tasks() -> None:
    """Sums of 2,048 rows that another op reads are divided among all processors."""

    def tasks_of(train: bool) -> int:
        with ark.use_model(ark.Model(0, 1)) as model:
            bias = ark.parameter([WIDTH], fp32)
            total = ark.reduce_sum(ark.tensor([2048, WIDTH], fp32), 0, keepdims=False)
            if train:
                ark.optim.AdamW([bias]).step([total])
            else:
                ark.add(total, ark.tensor([WIDTH], fp32))
        listed = planned(model.graph)
        sums = {op.id for op in listed.ops if op.kind == "reduce"}
        return sum(task.op in sums for tasks in listed.phases[0].processors for task in tasks)

    assert 2 * tasks_of(train=True) < tasks_of(train=False)
