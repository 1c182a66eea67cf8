"""The cost model compared with the order that a plan's waits and packets enforce."""

from __future__ import annotations

from typing import Any

import pytest

import ark
from ark.backend import registry
from ark.lower.pipeline import plan as make_plan
from ark.machine.capability import Capability
from ark.ops.indexing import remap, same
from ark.plan import kind as kinds
from ark.plan.cost import apart, iteration_us, predict, work
from ark.plan.serialize import machine_of
from tests.unit.plan.oracle import order, tasks
from tests.unit.plan.shapes import decoder_plans, machine


@pytest.mark.parametrize("capabilities", [(), (Capability.PACKETS,)])
@pytest.mark.parametrize("processors", [1, 3, 7])
def test_no_task_is_predicted_before_its_dependencies(
    processors: int, capabilities: tuple[Capability, ...]
) -> None:
    """If a task depends on a task of another processor, its predicted start is later than the other
    task's end by at least the time of a signal.
    """
    (plan,) = decoder_plans(machine(processors, *capabilities, warps=2 if capabilities else 1))
    assert any(t.packet for t in plan.tensors) == bool(capabilities)
    crossing = 0
    for number in range(len(plan.phases)):
        spans = {(number, s.processor, s.position): s for s in predict(plan, number)}
        assert spans.keys() == {k for k in tasks(plan) if k[0] == number}
        for a, b in order(plan, number).edges:
            hand_over = machine_of(plan).costs.signal_us if a[1] != b[1] else 0.0
            assert spans[b].begin >= spans[a].end + hand_over, (a, b)
            crossing += a[1] != b[1]
    assert crossing or processors == 1


def test_work_is_the_time_of_one_processor() -> None:
    (plan,) = decoder_plans(machine(1))
    for number in range(len(plan.phases)):
        spans = predict(plan, number)
        assert work(plan, number) == pytest.approx(sum(s.end - s.begin for s in spans))
        assert work(plan, number) == pytest.approx(max(s.end for s in spans))


def convolved(shape: tuple[int, ...], groups: int, **form: Any) -> tuple[list[str], float]:
    """The kinds of a convolution's ops on an H100, and its predicted microseconds."""
    model = ark.Model(0, 1)
    with ark.use_model(model):
        image = ark.tensor((16, groups * shape[1], 56, 56), ark.bf16)
        ark.conv(image, ark.tensor(shape, ark.bf16), padding=1, groups=groups, **form)
    plan = make_plan(model.graph, registry.machine("h100"))
    return [op.kind for op in plan.ops], iteration_us(plan)


def test_convolutions_in_groups_are_predicted_at_the_rate_of_their_body() -> None:
    """Without channels last, groups of several outputs read the image element by element: an H200
    takes 50 to 200 us for one of these. A depthwise convolution has a body of its own.
    """
    kinds, several = convolved((64, 8, 3, 3), 8)
    assert kinds == ["convolution"] and 50 < several < 200
    kinds, one = convolved((64, 1, 3, 3), 64)
    assert kinds == ["convolution"] and one < several / 4


def moved(build: Any) -> float:
    """The predicted microseconds on an H100 of an op on 16 images of 64 channels in fp32."""
    model = ark.Model(0, 1)
    with ark.use_model(model):
        build(ark.tensor((16, 64, 56, 56), ark.fp32))
    return iteration_us(make_plan(model.graph, registry.machine("h100")))


def test_copies_of_single_elements_and_sums_of_short_rows_are_predicted_to_take_longer() -> None:
    """In a training step an H200 took 18 us for a task that writes windows of 3 x 3 as the last
    dimensions, and 169 us for a task that adds up rows of 9 elements.
    """

    def copied(places: tuple[int, int], taps: tuple[int, int], shape: list[int]) -> Any:
        rules = [
            same(0),
            same(1),
            *([[[tap, 1], [at, 1]], -1, 1, "fill"] for at, tap in zip(places, taps, strict=True)),
        ]
        return lambda x: remap("windows", x, [16, 64, *shape], rules)

    first = moved(copied((4, 5), (2, 3), [3, 3, 56, 56]))
    last = moved(copied((2, 3), (4, 5), [56, 56, 3, 3]))
    assert last > 3 * first
    short = moved(lambda x: ark.reduce_sum(ark.reshape(x, [-1, 7]), 1))
    long = moved(lambda x: ark.reduce_sum(ark.reshape(x, [-1, 56]), 1))
    assert short > 2 * long


@pytest.mark.parametrize(("channels", "fill"), [(64, 0.0), (64, 1.0), (8, 0.0)])
def test_copies_through_shared_memory_are_those_of_the_source(channels: int, fill: float) -> None:
    """The cost of single elements applies unless the device function exchanges the dimensions in
    shared memory.
    """
    rules = [same(1), same(2), same(3), same(0)]
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.tensor((16, 56, 56, channels), ark.fp32)
        remap("turned", x, [channels, 16, 56, 56], rules, fill)
    planned = make_plan(model.graph, registry.machine("h100"))
    (op,) = (op for op in planned.ops if op.kind == "remap")
    signature, machine = kinds.signature(planned, op), machine_of(planned)
    kind = kinds.get("remap")
    turned = "ark_turned" in kind.source("body", signature, machine)
    assert turned == (channels == 64 and not fill)
    assert (apart(signature, machine) == 0) == turned
