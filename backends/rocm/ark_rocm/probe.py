"""Looks for AMD GPUs; if there are none, reports the reason and a remedy.

Creates no context and never raises. With `ARK_ROCM_DEVICE=emulated:gfx942`, the optional package
ark_rocm_emulator first replaces the HIP library by its own one. Called by ark_rocm.__init__.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from ark.backend.protocol import DeviceInfo, Probe
from ark.errors import BaseError, SystemError
from ark_rocm import driver

VARIABLE = "ARK_ROCM_DEVICE"


def probe() -> Probe:
    """Looks for devices; see ark.backend.protocol.Probe."""
    versions = {"hip-python": driver.package_version() or "not installed"}
    try:
        notes = prepare()
        return _look(versions, notes)
    except BaseError as error:
        reason, _, remedy = str(error).partition("; ")
        return Probe(reason=reason, remedy=remedy, versions=versions)
    except Exception as error:
        return Probe(
            reason=f"looking for AMD GPUs failed: {error}",
            remedy="run `rocminfo` to see whether ROCm itself works",
            versions=versions,
        )


def prepare() -> tuple[str, ...]:
    """Activates the emulator if ARK_ROCM_DEVICE asks for it. Returns notes for the user about
    emulated devices; none for real ones.
    """
    wanted = os.environ.get(VARIABLE, "")
    if not wanted:
        return ()
    kind, _, spec = wanted.partition(":")
    if kind != "emulated" or not spec:
        raise SystemError(
            f"{VARIABLE}={wanted!r} is not valid; expected emulated:ARCH, such as emulated:gfx942, "
            f"or shim (runs `ark doctor` on an NVIDIA GPU); unset it to use AMD GPUs"
        )
    try:
        emulator = importlib.import_module("ark_rocm_emulator")
    except ImportError as error:
        raise SystemError(
            f"{VARIABLE}={wanted} asks for an emulated device, but the package ark_rocm_emulator "
            f"cannot be imported ({error}); install it with `pip install ark-gpu-rocm-emulator`"
        ) from error
    try:
        emulator.activate(wanted)
    except BaseError:
        raise
    except Exception as error:
        raise SystemError(
            f"the emulator could not start for {VARIABLE}={wanted}: {error}; a C++ compiler or the "
            f"ziglang package is needed: `pip install ark-gpu-rocm-emulator`"
        ) from error
    return (str(emulator.describe()),)


def _look(versions: dict[str, str], notes: tuple[str, ...]) -> Probe:
    """Looks for devices. notes: notes on emulated devices; empty if the devices are real."""
    hip, emulated = driver.module(), bool(notes)
    try:
        major, minor = driver.runtime_version(hip)
    except SystemError as error:
        reason, _, remedy = str(error).partition("; ")
        return Probe(reason=reason, remedy=remedy, versions=versions, notes=notes)
    versions["hip runtime"] = f"{major}.{minor}"
    made_for = int(getattr(hip, "HIP_VERSION_MAJOR", major))
    mismatch = made_for != major
    wanted = f"pip install 'hip-python>={major},<{major + 1}'"
    result = hip.hipGetDeviceCount()
    code, count = result[0], int(result[1])
    if int(code) != 0 or count == 0:
        word = getattr(code, "name", str(code))
        reason = f"HIP {major}.{minor} finds no AMD GPU ({word})"
        remedy = "check that /dev/kfd exists, that this user is in the groups render and video"
        remedy += ", and that `rocminfo` lists a GPU"
        if mismatch:
            reason += f", and hip-python {versions['hip-python']} is made for HIP {made_for}"
            remedy = wanted
        return Probe(reason=reason, remedy=remedy, versions=versions, notes=notes)
    if mismatch:
        notes += (
            f"hip-python {versions['hip-python']} is made for HIP {made_for} but the driver "
            f"is {major}.{minor}; if calls fail, `{wanted}`",
        )
    devices = tuple(_device(hip, index) for index in range(count))
    return Probe(devices=devices, versions=versions, notes=notes, emulated=emulated)


def _device(hip: Any, index: int) -> DeviceInfo:
    properties = driver.device_properties(hip, index)
    return DeviceInfo(
        index,
        text(properties.name),
        text(properties.gcnArchName).partition(":")[0],
        int(properties.totalGlobalMem),
    )


def text(value: bytes | str) -> str:
    """Converts a C string in a HIP structure."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
