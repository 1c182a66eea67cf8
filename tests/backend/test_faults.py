"""Plans that hang on purpose: every wait times out, and the error names the waiting task and the
counter.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from typing import Any

import pytest

from ark.backend import registry
from ark.errors import GpuError, PlanError
from ark.ir.dtype import by_name
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.models.build import Shape
from ark.models.plans import plans
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.cases.faults import decoder, prepare, small_machine, without_a_signal
from tests.unit.plan.shapes import CONFIG


@pytest.fixture
def device(backend: str) -> Any:
    opened = registry.get(backend).open(0)
    yield opened
    opened.close()


def decoders(machine: Machine) -> list[Plan]:
    """Returns the decoder in every kernel variant that the device offers, and one for three
    sequences.
    """
    names = dict.fromkeys(variant.name for variant in machine.variants)
    batch = plans(Shape(CONFIG, by_name("bf16"), 64, 0, batch=3), machine)
    return [*(decoder(machine, variant=name) for name in names), *batch]


def test_missing_signal_ends_in_an_error_that_names_everything(backend: str, device: Any) -> None:
    for plan in decoders(small_machine(device.machine)):
        missing_signal(plan, backend, device)


def missing_signal(plan: Plan, backend: str, device: Any) -> None:
    broken, counter = without_a_signal(plan)
    with pytest.raises(PlanError):
        verify([broken])
    chosen = registry.get(backend)
    with Executor(broken, chosen, device, budget_s=0.5) as executor:
        prepare(executor)
        begin = time.monotonic()
        with pytest.raises(GpuError) as caught:
            executor.start(4).wait(20)
        assert time.monotonic() - begin < 20
    text = str(caught.value)
    assert repr(plan.counters[counter].name) in text
    for word in ("task ", "tensor ", "rank 0", "processor ", "iteration 0", "expected ", "seen "):
        assert word in text, text
    with Executor(plan, chosen, device, budget_s=5.0) as executor:
        prepare(executor)
        run = executor.start(4)
        assert run.wait(20)
        assert run.iterations_done == 4


@pytest.mark.emulated("gfx942")
def test_missing_packet_ends_in_an_error(backend: str, device: Any) -> None:
    """If the op that writes packets is removed from a plan, its readers time out with an error."""
    for plan in decoders(small_machine(device.machine, Capability.PACKETS)):
        missing_packet(plan, backend, device)


def missing_packet(plan: Plan, backend: str, device: Any) -> None:
    phase = plan.phases[0]
    assert plan.tensors[plan.ops[0].operands[2]].packet
    lists = tuple(tuple(t for t in own if t.op != 0) for own in phase.processors)
    broken = dataclasses.replace(plan, phases=(dataclasses.replace(phase, processors=lists),))
    with pytest.raises(PlanError):
        verify([broken])
    with Executor(broken, registry.get(backend), device, budget_s=0.5) as executor:
        prepare(executor)
        with pytest.raises(GpuError, match="waited for a packet"):
            executor.start(2).wait(20)


def test_host_can_abort_a_running_kernel(backend: str, device: Any) -> None:
    for plan in decoders(small_machine(device.machine)):
        host_abort(plan, backend, device)


def host_abort(plan: Plan, backend: str, device: Any) -> None:
    with Executor(plan, registry.get(backend), device, budget_s=30.0) as executor:
        prepare(executor)
        run = executor.start(1 << 30, persistent=True)
        run.release(2)
        assert run.wait_done(2, 20)
        run.abort()
        begin = time.monotonic()
        assert run.stop()
        assert not run.running()
        assert time.monotonic() - begin < 20


def test_launches_that_outlive_their_device_are_dropped(backend: str) -> None:
    """A launch that an exception's traceback keeps alive beyond its device is dropped without an
    error.
    """
    device = registry.get(backend).open(0)
    plan = decoder(small_machine(device.machine))
    with Executor(plan, registry.get(backend), device) as executor:
        prepare(executor)
        run = executor.start(2)
        assert run.wait(20)
    memory = device.alloc(4096, "device"), device.alloc(4096, "host")
    device.close()
    device.close()
    for one in memory:
        device.free(one)
    del run, executor
    gc.collect()
    reopened = registry.get(backend).open(0)
    try:
        with Executor(plan, registry.get(backend), reopened) as executor:
            prepare(executor)
            assert executor.start(2).wait(20)
    finally:
        reopened.close()
