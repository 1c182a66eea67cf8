"""Calls the HIP runtime through hip-python and translates its errors to ark's. Called by probe,
device, compiler.

hip-python opens the driver's libraries at the first call, so a successful import does not show that
they exist. The names of its modules differ between versions 6.x, 7.x and 10.x, so all imports of it
are in this file.
"""

from __future__ import annotations

import contextlib
import importlib
from importlib import metadata
from typing import Any

from ark.errors import BaseError, GpuError, SystemError

INSTALL = "pip install 'ark-gpu[rocm]'"

# Constants of HIP that some versions of the Python bindings lack.
MALLOC_UNCACHED = 0x3
HOST_MAPPED = 0x2
HOST_COHERENT = 0x40000000
STREAM_NON_BLOCKING = 0x1
IPC_LAZY_PEER_ACCESS = 0x1

# Errors that a kernel causes, as opposed to a missing driver or device.
_FAULTS = ("LaunchFailure", "LaunchTimeOut", "IllegalAddress", "Assert", "ECCNotCorrectable")


def module() -> Any:
    """hip-python's module `hip`. Raises SystemError if it is not installed."""
    return _import("hip")


def select(hip: Any, index: int) -> None:
    """Selects a device for the calling thread; HIP's current device is per thread."""
    call("hipSetDevice", hip.hipSetDevice, index)


def rtc() -> Any:
    """hip-python's module `hiprtc`. Raises SystemError if it is not installed."""
    return _import("hiprtc")


def _import(name: str) -> Any:
    try:
        package = importlib.import_module("hip")
        # HIP's modules are submodules of the bindings up to version 7.x, and attributes of a
        # compatibility package in 10.x.
        return getattr(package, name, None) or importlib.import_module(f"hip.{name}")
    except ImportError as error:
        raise SystemError(
            f"the rocm backend needs the package hip-python, which cannot be imported ({error}); "
            f"install it with `{INSTALL}`"
        ) from error


def library() -> str:
    """The path of the HIP library that hip-python has opened, or only its name if the path is
    unknown.
    """
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if "libamdhip64" in path:
                return path
    return "libamdhip64.so"


def package_version() -> str:
    """The version of hip-python, or an empty string if it is unknown."""
    try:
        return metadata.version("hip-python")
    except metadata.PackageNotFoundError:
        return ""


def runtime_version(hip: Any) -> tuple[int, int]:
    """The version (major, minor) of the HIP library that was opened."""
    version = int(call("hipRuntimeGetVersion", hip.hipRuntimeGetVersion))
    return version // 10_000_000, version // 100_000 % 100


def call(name: str, function: Any, *args: Any, doing: str = "") -> Any:
    """Calls a HIP function and returns its value (a tuple if several, None if there is none).

    Raises GpuError for a fault of a kernel, SystemError for everything else.
    """
    try:
        result = function(*args)
    except RuntimeError as error:
        fault = "was not found" if "dlopen" in str(error) else f"cannot be used ({error})"
        raise SystemError(
            f"ROCm's library libamdhip64.so {fault}; install ROCm and the amdgpu driver, or put "
            "the folder of its libraries (/opt/rocm/lib) on LD_LIBRARY_PATH"
        ) from error
    values = result if isinstance(result, tuple) else (result,)
    code = values[0]
    if int(code) != 0:
        raise failure(name, code, doing)
    if len(values) == 1:
        return None
    return values[1] if len(values) == 2 else values[1:]


def failure(name: str, code: Any, doing: str = "") -> BaseError:
    """The exception for an error code of HIP."""
    word = getattr(code, "name", str(code))
    where = f" while {doing}" if doing else ""
    if any(fault in word for fault in _FAULTS):
        return GpuError(
            f"the GPU reported {word} ({name}){where}; this process cannot use the device any "
            f"more: start it again"
        )
    return SystemError(
        f"{name} failed with {word}{where}; check the driver and the device with `rocminfo` and "
        f"`dmesg`"
    )


def device_properties(hip: Any, index: int) -> Any:
    """The hipDeviceProp_t structure of a device. hip-python 10 returns a new structure; versions 6
    and 7 fill in one that the caller passes.
    """
    try:
        return call("hipGetDeviceProperties", hip.hipGetDeviceProperties, index)
    except TypeError:
        properties = hip.hipDeviceProp_t()
        call("hipGetDeviceProperties", hip.hipGetDeviceProperties, properties, index)
        return properties
