"""Kernels with a planted defect: the checks must report each one, and nothing in kernels without a
defect.

A defect is an edit of a kernel of the suite, in its source (a barrier removed, a fence weakened, an
index off by one) or in its machine code (an `s_waitcnt` or a cache operation replaced by `s_nop` of
the same size). Without checks, the emulator would compute the right values for most of them.
"""

from __future__ import annotations

import os

import kernel_cases
import numpy as np
import pytest
from ark_rocm_emulator import ErrorKind, emulated, failures
from defects import CASES, DEFECTS, DEVICE_DEFECTS, Defect, broken
from hip import hip
from hip_runner import (
    HipError,
    check,
    code_object,
    exchange_between_devices,
    run_case,
    run_work,
)
from kernel_cases import Target

SWEEP = os.environ.get("ARK_EMULATOR_SWEEP") == "1"


def _reported_kinds(defect: Defect, seed: int) -> list[ErrorKind]:
    case = CASES[defect.kernel]
    with emulated(defect.arch, seed=seed, checks=1, external_wait_ms=3000, report=0):
        module = check(hip.hipModuleLoadData(broken(defect)))
        function = check(hip.hipModuleGetFunction(module, defect.kernel.encode()))
        work = case.make(np.random.default_rng(seed), Target(defect.arch))
        try:
            run_work(function, case, work)
        except HipError:
            return [failure.kind for failure in failures()]
    return []


@pytest.mark.parametrize(
    "defect", [pytest.param(d, id=f"{d.kernel}-{d.description}".replace(" ", "_")) for d in DEFECTS]
)
def test_defect_is_reported(defect: Defect) -> None:
    reported = _reported_kinds(defect, seed=1)
    assert reported, "nothing was reported"
    assert reported[0] in defect.kinds, reported


@pytest.mark.parametrize(
    "defect", [pytest.param(d, id=d.description.replace(" ", "_")) for d in DEVICE_DEFECTS]
)
def test_defect_between_devices_is_reported(defect: Defect) -> None:
    with emulated(defect.arch, 2, seed=1, checks=1, external_wait_ms=5000, report=0):
        with pytest.raises(HipError):
            exchange_between_devices(broken(defect))
        assert failures()[0].kind in defect.kinds


@pytest.mark.parametrize("arch", kernel_cases.ALL)
def test_sound_exchange_between_devices_raises_no_alarm(arch: str) -> None:
    with emulated(arch, 2, seed=1, checks=1, report=0):
        exchange_between_devices(code_object("sync.hip", arch, ("-O3",)))


def _sound() -> list[tuple[str, str]]:
    """(kernel, architecture) of the kernels to test unedited: all kernels on two architectures or,
    if ARK_EMULATOR_SWEEP is set, on all four.
    """
    archs = kernel_cases.ALL if SWEEP else ("gfx942", "gfx1100")
    return [(name, arch) for name, case in CASES.items() for arch in archs if arch in case.archs]


@pytest.mark.parametrize(("name", "arch"), _sound())
def test_sound_kernels_raise_no_alarm(name: str, arch: str) -> None:
    for seed in range(3 if SWEEP else 1):
        with emulated(arch, seed=seed, checks=1, report=0):
            run_case(CASES[name], arch, ("-O3",), seed)


def test_there_are_enough_defects() -> None:
    assert len(DEFECTS) >= 30
    assert len({(d.kernel, d.description) for d in DEFECTS}) == len(DEFECTS)
