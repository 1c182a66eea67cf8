"""Ranks over links that carry loads and stores but no read-modify-write: signals are stores then.

The emulated devices stop a kernel that asks such a link for more.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

import numpy as np
import pytest

from ark.backend import registry
from ark.backend.protocol import Device
from ark.errors import GpuError, PlanError
from ark.machine import Machine
from ark.runtime.admission import admit
from tests.multi.test_channels import PROGRAMS, put_then_signal, run, wanted
from tests.multi.test_collectives import build, check_collectives, short_suite
from tests.slow import slow

emulator = pytest.importorskip("ark_rocm_emulator")
pytest.importorskip("hip")

WORD = "peer_stores"
ITERATIONS = 4


def opened(arch: str, stack: ExitStack, **options: int) -> tuple[list[Device], Machine]:
    """Two devices whose link carries stores alone."""
    stack.enter_context(emulator.emulated(arch, 2, stores_only=1, compute_units=3, **options))
    made = [registry.get("rocm").open(rank) for rank in range(2)]
    for device in made:
        stack.callback(device.close)
    return made, made[0].machine


def adding(machine: Machine) -> Machine:
    """The machine with links that carry everything."""
    words = tuple(word for word in machine.capabilities if word != WORD)
    return dataclasses.replace(machine, capabilities=words)


@pytest.mark.parametrize("arch", ["gfx1100", pytest.param("gfx942", marks=slow)])
@pytest.mark.parametrize("option", ["checks", "stale"])
def test_channels(arch: str, option: str) -> None:
    with ExitStack() as stack:
        made, machine = opened(arch, stack, **{option: 1})
        assert machine.has(WORD)
        for body in PROGRAMS:
            got = run(build(2, body, machine), "rocm", made, ITERATIONS)
            np.testing.assert_array_equal(got, wanted(len(got), ITERATIONS), body.__name__)


@slow
@pytest.mark.parametrize("arch", ["gfx1100", "gfx942"])
def test_collectives(arch: str) -> None:
    with ExitStack() as stack:
        check_collectives("rocm", 2, *opened(arch, stack, checks=1), short_suite)


def test_additions_are_stopped_there() -> None:
    with ExitStack() as stack:
        made, machine = opened("gfx1100", stack, report=0)
        plans = build(2, put_then_signal, adding(machine))
        with pytest.raises(GpuError):
            run(plans, "rocm", made, ITERATIONS, budget_s=2.0)
        kinds = {failure.kind for failure in emulator.failures()}
        assert emulator.ErrorKind.LINK in kinds


def test_a_plan_whose_ranks_add_is_refused() -> None:
    """It may have been made elsewhere, for the product by its name."""
    product = registry.machine("rx7900xtx")
    plans = build(2, put_then_signal, product.with_processors(4))
    admit(plans, product)
    lacking = dataclasses.replace(product, capabilities=(*product.capabilities, WORD))
    with pytest.raises(PlanError, match="carry stores alone"):
        admit(plans, lacking)
