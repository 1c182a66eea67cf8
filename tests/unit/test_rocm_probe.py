"""Probing for AMD GPUs on machines without one, or with an incomplete installation."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import pytest
from ark_rocm import backend, driver, probe

from ark.errors import GpuError, SystemError


class Code(IntEnum):
    hipSuccess = 0
    hipErrorNoDevice = 100
    hipErrorIllegalAddress = 700


class Properties:
    name = b"AMD Instinct MI300X"
    gcnArchName = b"gfx942:sramecc+:xnack-"
    totalGlobalMem = 192 << 30


def fake_hip(devices: int, version: int = 70_200_000) -> Any:
    none = Code.hipSuccess if devices else Code.hipErrorNoDevice
    return types.SimpleNamespace(
        HIP_VERSION_MAJOR=7,
        hipRuntimeGetVersion=lambda: (Code.hipSuccess, version),
        hipGetDeviceCount=lambda: (none, devices),
        hipGetDeviceProperties=lambda index: (Code.hipSuccess, Properties),
    )


@pytest.fixture(autouse=True)
def _no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(probe.VARIABLE, raising=False)
    monkeypatch.setattr(driver, "package_version", lambda: "7.2.0")


def looks(monkeypatch: pytest.MonkeyPatch, module: Callable[[], Any]) -> Any:
    monkeypatch.setattr(driver, "module", module)
    return backend.probe()


def test_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = looks(monkeypatch, lambda: fake_hip(2))
    assert [(d.index, d.name, d.arch) for d in actual.devices] == [
        (0, "AMD Instinct MI300X", "gfx942"),
        (1, "AMD Instinct MI300X", "gfx942"),
    ]
    assert actual.reason == "" and actual.notes == ()
    assert actual.versions == {"hip-python": "7.2.0", "hip runtime": "7.2"}


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = looks(monkeypatch, lambda: fake_hip(0))
    assert actual.reason == "HIP 7.2 finds no AMD GPU (hipErrorNoDevice)"
    assert "/dev/kfd" in actual.remedy


def test_library_of_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = looks(monkeypatch, lambda: fake_hip(0, version=60_400_000))
    assert "hip-python 7.2.0 is made for HIP 7" in actual.reason
    assert actual.remedy == "pip install 'hip-python>=6,<7'"
    (note,) = looks(monkeypatch, lambda: fake_hip(1, version=60_400_000)).notes
    assert "the driver is 6.4" in note


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hip", None)
    actual = backend.probe()
    assert "hip-python" in actual.reason and "ark-gpu[rocm]" in actual.remedy


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("failed to dlopen 'libamdhip64.so'")

    hip = fake_hip(1)
    hip.hipRuntimeGetVersion = missing
    actual = looks(monkeypatch, lambda: hip)
    assert "libamdhip64.so" in actual.reason and "ROCm" in actual.remedy
    with pytest.raises(SystemError, match=r"AMD GPU 0 cannot be opened: .*libamdhip64"):
        backend.open(0)


def test_driver_that_answers_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    hip = fake_hip(1)
    hip.hipGetDeviceProperties = lambda index: 1 / 0
    actual = looks(monkeypatch, lambda: hip)
    assert "division by zero" in actual.reason and "rocminfo" in actual.remedy


def test_emulation_is_used_on_request_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    emulator: Any = types.ModuleType("ark_rocm_emulator")
    emulator.activate = asked.append
    emulator.describe = lambda: "emulated gfx942"
    monkeypatch.setitem(sys.modules, "ark_rocm_emulator", emulator)
    monkeypatch.setenv(probe.VARIABLE, "emulated:gfx942")
    actual = looks(monkeypatch, lambda: fake_hip(1))
    assert asked == ["emulated:gfx942"] and actual.notes == ("emulated gfx942",)

    def broken(spec: str) -> None:
        raise OSError("no C++ compiler")

    emulator.activate = broken
    actual = backend.probe()
    assert "no C++ compiler" in actual.reason and "ark-gpu-rocm-emulator" in actual.remedy


@pytest.mark.parametrize(
    ("value", "words"),
    [("emulated:gfx942", "ark_rocm_emulator"), ("gfx942", "is not valid")],
)
def test_unavailable_emulation_is_reported(
    monkeypatch: pytest.MonkeyPatch, value: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "ark_rocm_emulator", None)
    monkeypatch.setenv(probe.VARIABLE, value)
    actual = looks(monkeypatch, lambda: fake_hip(1))
    assert actual.devices == () and words in actual.reason


def test_errors_of_the_device_and_of_the_machine() -> None:
    with pytest.raises(GpuError, match="hipErrorIllegalAddress"):
        driver.call("hipEventQuery", lambda: (Code.hipErrorIllegalAddress,))
    with pytest.raises(SystemError, match="hipErrorNoDevice while trying"):
        driver.call("hipInit", lambda: Code.hipErrorNoDevice, doing="trying")
    assert driver.call("hipMemGetInfo", lambda: (Code.hipSuccess, 1, 2)) == (1, 2)
