"""Ranks in several processes share the vector clocks of the checks. So a defect between two devices
must be reported also if the devices belong to two processes, and correct kernels must not be
reported.
"""

from __future__ import annotations

import kernel_cases
import pytest
from defects import DEVICE_DEFECTS, Defect, broken
from hip_runner import code_object
from two_processes import exchange

from tests.slow import slow


# `nox` tests one CDNA and one RDNA architecture.
@pytest.mark.parametrize(
    "arch",
    [pytest.param(a, marks=[slow] * (a not in ("gfx942", "gfx1100"))) for a in kernel_cases.ALL],
)
def test_sound_exchange_raises_no_alarm(arch: str) -> None:
    assert exchange(arch, code_object("sync.hip", arch, ("-O3",)), checks=1) == []


@pytest.mark.parametrize(
    "defect", [pytest.param(d, id=d.description.replace(" ", "_")) for d in DEVICE_DEFECTS]
)
def test_defect_between_processes_is_reported(defect: Defect) -> None:
    assert set(exchange(defect.arch, broken(defect), checks=1)) & set(defect.kinds)


@pytest.mark.parametrize("defect", [DEVICE_DEFECTS[0]], ids=["signal's_scope"])
def test_values_alone_do_not_tell(defect: Defect) -> None:
    assert exchange(defect.arch, broken(defect)) == []
