"""Random graphs on random machines: the verifier and brute force accept the planner's result, and
agree on the same plan without one of its waits.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ark
from ark.errors import PlanError
from ark.frontend.model import Model, use_model
from ark.lower import tiling
from ark.lower.pipeline import plan as make_plan
from ark.machine.capability import Capability
from ark.plan.types import Plan
from ark.plan.verify import verify
from tests.cases.verify import MORE
from tests.programs import build
from tests.unit.plan.oracle import faults, tasks
from tests.unit.plan.shapes import decoder_plans, machine, replace_task

relaxed = settings(
    max_examples=60 * MORE,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def accepted(plan: Plan) -> bool:
    try:
        verify([plan])
    except PlanError:
        return False
    return True


def check(plan: Plan, rng: random.Random, deletions: int) -> None:
    """Verifies the plan. Asserts that, without one of its waits, the verifier and the
    oracle agree.
    """
    assert faults(plan, 0) == []
    verify([plan])
    places = [(k, i) for k, t in tasks(plan).items() if k[0] == 0 for i in range(len(t.waits))]
    for place, i in rng.sample(places, min(deletions, len(places))):
        waits = list(tasks(plan)[place].waits)
        del waits[i]
        changed = replace_task(plan, place, waits=tuple(waits))
        assert accepted(changed) == (faults(changed, 0) == []), (place, i)


@given(
    seed=st.integers(0, 2**32 - 1),
    processors=st.sampled_from([1, 2, 3, 5, 40]),
    tile=st.sampled_from([4, 16, 48, 2048]),
    steps=st.integers(1, 9),
    packets=st.booleans(),
)
@relaxed
def test_verifier_and_brute_force_agree(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    processors: int,
    tile: int,
    steps: int,
    packets: bool,
) -> None:
    monkeypatch.setattr(tiling, "least_elements", lambda _: tile)
    model = Model(0, 1)
    with use_model(model):
        build(seed, steps)
    target = machine(processors, *([Capability.PACKETS] if packets else []))
    target = dataclasses.replace(target, tile=(4, 4))
    plan = make_plan(model.graph, target, {"external": sorted(model.storages.keys())})
    check(plan, random.Random(seed), 3)


@pytest.mark.parametrize("inner", [slice(0, 4), slice(4, 12), slice(0, 16)])
def test_write_hides_only_the_bytes_that_it_covers(
    monkeypatch: pytest.MonkeyPatch, inner: slice
) -> None:
    """A write hides earlier writes only for the bytes that it covers: here the whole tensor is
    written, then some columns, and a read of other columns still needs the first write.
    """
    monkeypatch.setattr(tiling, "least_elements", lambda _: 4)
    model = Model(0, 1)
    with use_model(model):
        x, y = (ark.tensor([6, 16], name=name) for name in "xy")
        ark.copy(x, y)
        ark.copy(x[:, inner], y[:, inner])
        ark.relu(y[1:5, 8:16])
    target = machine(24)
    plan = make_plan(model.graph, target, {"external": sorted(model.storages.keys())})
    check(plan, random.Random(0), 40)


@pytest.mark.parametrize("processors", [2, 3])
def test_verifier_and_brute_force_agree_on_packets(processors: int) -> None:
    """Verifier and brute force agree on decoders, which have both packets and counters. A packet
    proves that its sender ran, but does not make the sender's other writes visible.
    """
    (plan,) = decoder_plans(machine(processors, Capability.PACKETS, warps=2), chunk=0)
    assert any(t.packet for t in plan.tensors)
    check(plan, random.Random(processors), 12)
