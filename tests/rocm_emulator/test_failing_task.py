"""A task that fails under the checks: the host receives ark's error, and no race is reported.

A wave whose wait times out stops while other waves of its workgroup continue. Their communication
about the failure must be as free of races as the rest of the loop kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from ark_rocm_emulator import emulated, failures

from ark.backend import registry
from ark.errors import GpuError
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.types import Plan
from ark.runtime.executor import Executor
from tests.cases.faults import decoder, prepare, small_machine, without_a_signal
from tests.slow import in_turns


def missing_signal(machine: Machine) -> Plan:
    return without_a_signal(decoder(small_machine(machine)))[0]


def missing_packets(machine: Machine) -> Plan:
    """Returns a plan whose first tasks wait for packets that are never sent."""
    plan = decoder(small_machine(machine, Capability.PACKETS))
    phase = plan.phases[0]
    lists = tuple(tuple(t for t in own if t.op != 0) for own in phase.processors)
    return dataclasses.replace(plan, phases=(dataclasses.replace(phase, processors=lists),))


@pytest.mark.parametrize(
    ("arch", "broken", "message"),
    in_turns(
        ("gfx942", "gfx1100"),
        [(missing_signal, "waited for counter"), (missing_packets, "waited for a packet")],
    ),
)
def test_failing_task_is_no_race(
    arch: str, broken: Callable[[Machine], Plan], message: str
) -> None:
    for seed in range(3):
        with emulated(arch, seed=seed, checks=1, report=0):
            backend = registry.get("rocm")
            device = backend.open(0)
            with Executor(broken(device.machine), backend, device, budget_s=0.2) as executor:
                prepare(executor)
                with pytest.raises(GpuError, match=message):
                    executor.start(2).wait(20)
            device.close()
            assert not failures()
