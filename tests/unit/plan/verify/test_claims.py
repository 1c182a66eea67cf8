"""Plans with ops whose tiles processors take from a counter at run time (claim): which ops these
are, and what the verifier refuses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

import ark
from ark.errors import PlanError
from ark.frontend.model import Model, use_model
from ark.ir.dtype import bf16, fp32
from ark.lower import claims
from ark.lower.pipeline import plan
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.types import ITERATION_BARRIER, Plan
from ark.plan.verify import verify
from ark.tasks import elementwise
from tests.unit.plan.oracle import tasks
from tests.unit.plan.shapes import machine, replace_task

GPU = machine(4, Capability.CLAIMS, warps=2)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers the size from which an op's tiles are taken at run time."""
    monkeypatch.setattr(claims, "is_large", lambda nbytes, machine: nbytes >= 1 << 16)
    monkeypatch.setattr(elementwise, "CLAIM_BYTES", 1 << 10)


def _chain(rows: int = 256, target: Machine = GPU) -> Plan:
    """Returns a plan of three dependent ops on whole tensors: a sum, its softmax, and twice
    that.
    """
    model = Model()
    with use_model(model):
        x = ark.tensor([rows, 64], bf16, name="x")
        ark.mul(ark.softmax(ark.add(x, x)), 2.0)
    return plan(model.graph, target, {"fuse": False})


def test_large_ops_have_one_task_a_processor_and_a_counter_of_their_tiles() -> None:
    planned = _chain()
    verify([planned])
    assert [op.params["kind"] for op in planned.ops] == ["elementwise", "row_norm", "elementwise"]
    assert [len(listed) for listed in planned.phases[0].processors] == [3, 3, 3, 3]
    steps = [planned.counters[op.claims].step for op in planned.ops if op.claims is not None]
    assert steps == [256 * 64 * 2 // 1024, 256 // 16, 256 * 64 * 2 // 1024]


def test_op_begins_when_every_task_before_it_has_ended() -> None:
    chain_plan = _chain()
    for (_, _, place), task in tasks(chain_plan).items():
        assert [threshold for _, threshold in task.waits] == ([4] if place else [])


@pytest.mark.parametrize(
    "build",
    (
        lambda: _chain(32),
        lambda: _chain(target=machine(4, warps=2)),
        lambda: _chain(target=dataclasses.replace(GPU, processors=33)),
    ),
    ids=("small", "not measured there", "few tiles"),
)
def test_other_ops_keep_a_list_of_tiles(build: Callable[[], Plan]) -> None:
    kept = build()
    verify([kept])
    assert all(op.claims is None for op in kept.ops)


def _op(planned: Plan, number: int, **changes: Any) -> Plan:
    ops = list(planned.ops)
    ops[number] = dataclasses.replace(ops[number], **changes)
    return dataclasses.replace(planned, ops=tuple(ops))


def _counter(planned: Plan, **changes: Any) -> Plan:
    counters, number = list(planned.counters), planned.ops[0].claims
    assert number is not None
    counters[number] = dataclasses.replace(counters[number], **changes)
    return dataclasses.replace(planned, counters=tuple(counters))


def _params(planned: Plan, **changes: Any) -> Plan:
    return _op(planned, 0, params={**planned.ops[0].params, **changes})


def _first(planned: Plan, op: int) -> tuple[int, int, int]:
    return next(place for place, task in tasks(planned).items() if task.op == op)


def _signalled(planned: Plan) -> Plan:
    place, number = _first(planned, 0), planned.ops[0].claims
    assert number is not None
    signals = (*tasks(planned)[place].signals, number)
    return replace_task(_counter(planned, step=1), place, signals=signals)


def _peer(planned: Plan) -> Plan:
    buffers = [
        dataclasses.replace(b, arena="symmetric") if b.arena == "activation" else b
        for b in planned.buffers
    ]
    arenas = {**planned.arenas, "symmetric": planned.arenas["activation"]}
    return dataclasses.replace(planned, buffers=tuple(buffers), arenas=arenas)


DAMAGES: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "no counter": (lambda p: _op(p, 0, claims=None), "its counter is None"),
    "no tiles": (
        lambda p: _op(p, 0, kind="elementwise", params=p.ops[0].params["params"]),
        "only 4 of 32",
    ),
    "no such counter": (lambda p: _op(p, 0, claims=len(p.counters)), "does not exist"),
    "the barrier": (lambda p: _op(p, 0, claims=ITERATION_BARRIER), "another op or task uses"),
    "one counter for two": (lambda p: _op(p, 2, claims=p.ops[0].claims), "another op or task uses"),
    "a signal": (_signalled, "another op or task uses"),
    "another step": (lambda p: _counter(p, step=7), "is 7; they must be equal"),
    "a counter of peers": (lambda p: _counter(p, system=True), "peers signal"),
    "more tasks": (lambda p: _params(p, tasks=5), "those of the first"),
    "more tasks than tiles": (lambda p: _params(p, tasks=4000), "4000 tasks for"),
    "claims of claims": (
        lambda p: _params(p, kind="claimed", params=dict(p.ops[0].params)),
        "'claimed' does not support claimed tiles",
    ),
    "products": (lambda p: _params(p, kind="matmul"), "'matmul' does not support claimed tiles"),
    "many tiles": (
        lambda p: _params(p, params={**p.ops[0].params["params"], "tile": (1, 1, 1, 1)}),
        "those of the first",
    ),
    "another tile twice": (
        lambda p: replace_task(p, _first(p, 0), coord=tasks(p)[0, 3, 0].coord),
        "compute the same tile",
    ),
    "memory of peers": (_peer, "only this rank uses"),
    "no wait": (lambda p: replace_task(p, _first(p, 1), waits=()), "nothing makes the second wait"),
    "a wait for some": (
        lambda p: replace_task(
            p, _first(p, 1), waits=tuple((c, n - 1) for c, n in tasks(p)[_first(p, 1)].waits)
        ),
        "nothing makes the second wait",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_claims_are_refused(damage: str) -> None:
    change, message = DAMAGES[damage]
    chain_plan = _chain()
    with pytest.raises(PlanError, match=message):
        verify([change(chain_plan)])


def test_tiles_of_types_that_share_bytes_have_tasks_of_their_own() -> None:
    model = Model()
    with use_model(model):
        ark.copy(ark.tensor([512, 128], ark.uint4, name="x"))
        ark.copy(ark.tensor([512, 128], fp32, name="y"))
    planned = plan(model.graph, GPU, {"fuse": False})
    verify([planned])
    assert [op.claims is None for op in planned.ops] == [True, False]
