"""Named pipeline schedules: their published makespans, and that the checker accepts them."""

from __future__ import annotations

import itertools

import pytest

from ark.errors import InvalidUsageError, PlanError
from ark.parallel.pipeline import Schedule, shape, tessel, verify
from ark.parallel.pipeline.named import (
    PIPELINES,
    STAGES_PER_DEVICE,
    Named,
    Spans,
    list_schedule,
    named,
    replay,
)

SPANS = (Spans(1, 2, 1), Spans(1, 3, 1), Spans(2, 4, 2))


def wrong(plan: Named, schedule: Schedule, count: int) -> str | None:
    memory = [10**9 if m is None else m for m in plan.memory]
    return verify(plan.placement, memory, count, schedule.entries)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("inference", [False, True])
def test_every_named_schedule_is_valid(name: str, inference: bool) -> None:
    for devices, spans, count in itertools.product((1, 2, 4), SPANS, (1, 2, 4, 8)):
        plan = named(name, devices, spans, inference)
        schedule = list_schedule(plan, count)
        assert wrong(plan, schedule, count) is None
        assert schedule.makespan_bound <= schedule.makespan


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("count", [8, 16])
def test_makespans_are_the_published_ones(devices: int, spans: Spans, count: int) -> None:
    """Idle times as published. 1F1B and GPipe: p - 1 micro-batches; interleaved: p - 1 chunks;
    ZB-H1: (p-1)(F + B - W).
    """
    forward_and_backward, weights = spans.forward + spans.backward, spans.weights
    idle = {
        "gpipe": (devices - 1) * forward_and_backward,
        "1f1b": (devices - 1) * forward_and_backward,
        "interleaved": (devices - 1) * forward_and_backward,
        "zero-bubble": (devices - 1) * (forward_and_backward - 2 * weights),
    }
    for name, ends in idle.items():
        chunks = STAGES_PER_DEVICE if name == "interleaved" else 1
        schedule = list_schedule(named(name, devices, spans), count)
        assert schedule.makespan == count * chunks * forward_and_backward + ends


def test_1f1b_equals_the_schedule_of_tessel() -> None:
    schedule = tessel(shape("V", 4), 4, 8)
    result = list_schedule(named("1f1b", 4, Spans(1, 3)), 8)
    assert (result.makespan, result.period) == (schedule.makespan, schedule.period) == (44, 4)


def test_chimera_is_near_its_bound() -> None:
    for spans in SPANS:
        schedule = list_schedule(named("chimera", 4, spans), 8)
        assert schedule.makespan <= 1.05 * schedule.makespan_bound


def test_three_forward_passes_precede_the_backward_pass() -> None:
    schedule = list_schedule(named("3f1b", 4), 6)
    starts = {(e.block, e.micro_batch): e.start for e in schedule.entries}
    for m in range(6):
        assert starts["g3", m] < starts["h0", m] < starts["h3", m] < starts["f0", m]
        assert starts["f3", m] < starts["b3", m] < starts["b0", m]


def test_order_is_kept_with_other_times() -> None:
    plan = named("interleaved", 4)
    schedule = list_schedule(plan, 8)
    other = named("interleaved", 4, Spans(3, 4, 1))
    replayed = replay(schedule, other.placement, 8)
    assert wrong(other, replayed, 8) is None
    for device in range(4):
        first, second = (
            [(e.block, e.micro_batch) for e in s.entries if device in e.devices]
            for s in (schedule, replayed)
        )
        assert first == second
    assert replay(schedule, plan.placement, 8).makespan <= schedule.makespan


def test_invalid_arguments_are_refused_with_a_reason() -> None:
    with pytest.raises(InvalidUsageError, match="does not exist"):
        named("2f2b", 4)
    with pytest.raises(InvalidUsageError, match="65 devices"):
        named("1f1b", 65)
    with pytest.raises(InvalidUsageError, match="micro_batches=0"):
        list_schedule(named("1f1b", 4), 0)
    plan = named("1f1b", 2)
    with pytest.raises(PlanError, match="cannot continue"):
        list_schedule(Named(plan.placement, (0, 0), plan.priority), 2)
