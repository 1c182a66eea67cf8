"""The HIP stand-in through hip-python: devices, their properties, versions and error codes."""

from __future__ import annotations

import os
import subprocess
import sys

import hip as hip_package
import numpy as np
import pytest
from ark_rocm_emulator import activate, describe, emulated, set_option
from hip import hip
from hip_runner import Buffers, check, download

from ark.errors import InvalidUsageError

ATTRIBUTE = hip.hipDeviceAttribute_t
ERROR = hip.hipError_t


def _text(value: object) -> str:
    """Returns a C string as str: some versions of hip-python return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


@pytest.mark.parametrize(
    ("arch", "full", "wave", "lds"),
    [
        ("gfx90a", "gfx90a:sramecc+:xnack-", 64, 65536),
        ("gfx942", "gfx942:sramecc+:xnack-", 64, 65536),
        ("gfx950", "gfx950:sramecc+:xnack-", 64, 163840),
        ("gfx1100", "gfx1100", 32, 65536),
    ],
)
def test_properties_say_emulated(arch: str, full: str, wave: int, lds: int) -> None:
    with emulated(arch, compute_units=5):
        properties = check(hip.hipGetDeviceProperties(0))
        assert _text(properties.name) == f"emulated {arch} (no GPU)"
        assert _text(properties.gcnArchName) == full
        assert (properties.warpSize, properties.sharedMemPerBlock) == (wave, lds)
        assert properties.multiProcessorCount == 5
        assert properties.cooperativeLaunch == 1
        assert properties.clockRate == 0  # no figure is made up
        units = ATTRIBUTE.hipDeviceAttributeMultiprocessorCount
        assert check(hip.hipDeviceGetAttribute(units, 0)) == 5
        assert check(hip.hipDeviceGetAttribute(ATTRIBUTE.hipDeviceAttributeWarpSize, 0)) == wave
        assert "emulated" in describe() and "no GPU" in describe()


def test_attributes_agree_with_properties() -> None:
    pairs = {
        "hipDeviceAttributeCooperativeLaunch": "cooperativeLaunch",
        "hipDeviceAttributeMaxThreadsPerBlock": "maxThreadsPerBlock",
        "hipDeviceAttributeMaxSharedMemoryPerBlock": "sharedMemPerBlock",
        "hipDeviceAttributeComputeCapabilityMajor": "major",
        "hipDeviceAttributeComputeCapabilityMinor": "minor",
        "hipDeviceAttributeMaxRegistersPerBlock": "regsPerBlock",
        "hipDeviceAttributeMaxThreadsPerMultiProcessor": "maxThreadsPerMultiProcessor",
        "hipDeviceAttributeCanMapHostMemory": "canMapHostMemory",
        "hipDeviceAttributeManagedMemory": "managedMemory",
        "hipDeviceAttributeUnifiedAddressing": "unifiedAddressing",
        "hipDeviceAttributeHostRegisterSupported": "hostRegisterSupported",
        "hipDeviceAttributeL2CacheSize": "l2CacheSize",
    }
    with emulated("gfx942"):
        properties = check(hip.hipGetDeviceProperties(0))
        for attribute, name in pairs.items():
            value = check(hip.hipDeviceGetAttribute(getattr(ATTRIBUTE, attribute), 0))
            assert value == getattr(properties, name), attribute


def test_version_is_the_one_hip_python_was_made_for() -> None:
    with emulated("gfx942"):
        assert check(hip.hipRuntimeGetVersion()) == hip_package.HIP_VERSION
        assert check(hip.hipDriverGetVersion()) == hip_package.HIP_VERSION


def test_emulated_devices_exist_only_within_their_block() -> None:
    with emulated("gfx90a", 3):
        assert check(hip.hipGetDeviceCount()) == 3
        check(hip.hipSetDevice(2))
        assert check(hip.hipGetDevice()) == 2
        assert hip.hipSetDevice(3) == (ERROR.hipErrorInvalidDevice,)
        assert hip.hipGetDeviceProperties(-1)[0] == ERROR.hipErrorInvalidDevice
        data = np.arange(8, dtype=np.int32)
        with Buffers() as buffers:
            there = buffers.upload(data)
            with emulated("gfx1100"):
                assert check(hip.hipGetDeviceCount()) == 1
            assert check(hip.hipGetDeviceCount()) == 3
            np.testing.assert_array_equal(download(there, data.shape, data.dtype), data)
    assert hip.hipGetDeviceCount()[0] == ERROR.hipErrorNoDevice
    assert describe() == "nothing is emulated"


def test_devices_are_linked_directly() -> None:
    with emulated("gfx942", 2):
        assert tuple(check(hip.hipExtGetLinkTypeAndHopCount(0, 1))) == (4, 1)
        assert hip.hipExtGetLinkTypeAndHopCount(0, 0)[0] == ERROR.hipErrorInvalidValue


def test_last_error_is_returned_once() -> None:
    with emulated("gfx942"):
        hip.hipSetDevice(9)
        assert hip.hipPeekAtLastError() == (ERROR.hipErrorInvalidDevice,)
        assert hip.hipGetLastError() == (ERROR.hipErrorInvalidDevice,)
        assert hip.hipGetLastError() == (ERROR.hipSuccess,)


def test_errors_have_hips_names_and_descriptions() -> None:
    with emulated("gfx942"):
        for code in (ERROR.hipErrorOutOfMemory, ERROR.hipErrorNoDevice, ERROR.hipErrorNotReady):
            assert _text(check(hip.hipGetErrorName(code))) == code.name
        words = check(hip.hipGetErrorString(ERROR.hipErrorInvalidValue))
        assert _text(words) == "invalid argument"


@pytest.mark.parametrize(
    "request_text", ["emulated:gfx906", "emulated:gfx942,0", "emulated:", "emulated:gfx942,x"]
)
def test_requests_for_unknown_devices_are_refused(request_text: str) -> None:
    with pytest.raises(InvalidUsageError, match="Expected"):
        activate(request_text)


def test_settings_have_names() -> None:
    with pytest.raises(InvalidUsageError, match="no setting 'sead'"), emulated(sead=1):
        pass
    assert hip.hipGetDeviceCount()[0] == ERROR.hipErrorNoDevice
    with emulated("gfx942"):
        set_option("compute_units", 3)
        assert check(hip.hipGetDeviceProperties(0)).multiProcessorCount == 3


def test_emulator_is_active_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARK_ROCM_DEVICE", raising=False)
    assert activate() is None


def test_environment_chooses_devices_in_a_fresh_process() -> None:
    program = (
        "import ark_rocm_emulator as e; print(e.activate()); print(e.activate())\n"
        "from hip import hip\n"
        "print(hip.hipGetDeviceCount()[1], str(hip.hipDeviceGetName(99, 1)[1]))"
    )
    environment = {"ARK_ROCM_DEVICE": "emulated:gfx1100,2", "ARK_ROCM_EMULATOR_SEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**_environment(), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, last = done.stdout.splitlines()
    assert first == second and first.startswith("2 emulated gfx1100 devices")
    assert last.startswith("2 ") and "emulated gfx1100 (no GPU)" in last


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
