"""Looks for NVIDIA GPUs without creating a context. It never raises an error.

Every reason for a missing device is reported with its fix.
Called by the backend object, for `ark info`, `ark.init` and before a device is opened.
"""

from __future__ import annotations

from importlib import metadata

from ark.backend.protocol import DeviceInfo, Probe
from ark_cuda.machines import arch_name

MIN_COMPUTE = (8, 0)
# For each major version of CUDA, the first driver release that runs its programs.
DRIVER_RELEASE = {12: "525", 13: "580"}

_NO_DRIVER = (
    "no NVIDIA driver was found (libcuda is missing)",
    "install an NVIDIA GPU's driver, release 580 or later; in a container, start it with GPU access"
    " (docker run --gpus all)",
)


def probe() -> Probe:
    """The GPUs of this machine; see ark.backend.protocol.Probe."""
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError:
        return Probe(
            reason="the Python package cuda-python is not installed",
            remedy='pip install "ark-gpu[cuda]"',
        )
    try:
        return _probe(driver, nvrtc)
    except Exception as error:  # without libcuda the bindings raise their own error types
        if type(error).__name__ in ("DynamicLibNotFoundError", "RuntimeError"):
            return Probe(reason=_NO_DRIVER[0], remedy=_NO_DRIVER[1], versions=_versions())
        return Probe(
            reason=f"asking the NVIDIA driver failed: {error}",
            remedy="check that `nvidia-smi` works",
            versions=_versions(),
        )


def _versions() -> dict[str, str]:
    versions = {}
    for package in ("cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc", "nvidia-nvjitlink"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _words(driver, code) -> str:  # type: ignore[no-untyped-def]
    _, text = driver.cuGetErrorString(code)
    return text.decode() if text else str(code)


def _probe(driver, nvrtc) -> Probe:  # type: ignore[no-untyped-def]
    versions = _versions()
    (code,) = driver.cuInit(0)
    if code == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        return Probe(
            reason="the NVIDIA driver sees no GPU",
            remedy="check `nvidia-smi` and the variable CUDA_VISIBLE_DEVICES",
            versions=versions,
        )
    if code != driver.CUresult.CUDA_SUCCESS:
        return Probe(
            reason=f"the NVIDIA driver cannot be initialised: {_words(driver, code)}",
            remedy="check that `nvidia-smi` works; after a driver update, restart the machine",
            versions=versions,
        )
    _, version = driver.cuDriverGetVersion()
    versions["driver (CUDA)"] = f"{version // 1000}.{version % 1000 // 10}"
    _, major, minor = nvrtc.nvrtcVersion()
    versions["NVRTC (loaded)"] = f"{major}.{minor}"
    if version // 1000 < major:
        release = DRIVER_RELEASE.get(major, "a newer release")
        return Probe(
            reason=f"the NVIDIA driver is too old: it runs CUDA {versions['driver (CUDA)']},"
            f" and the installed compiler makes programs for CUDA {major}",
            remedy=f"update the driver to release {release} or later",
            versions=versions,
        )
    devices, notes = _devices(driver)
    if not devices:
        return Probe(
            reason="none of the NVIDIA GPUs here has compute capability 8.0 or later",
            remedy="use another machine, or `--backend cpu`",
            versions=versions,
            notes=notes,
        )
    return Probe(devices=devices, versions=versions, notes=notes)


def _devices(driver) -> tuple[tuple[DeviceInfo, ...], tuple[str, ...]]:  # type: ignore[no-untyped-def]
    attribute = driver.CUdevice_attribute
    devices, notes = [], []
    _, count = driver.cuDeviceGetCount()
    for index in range(count):
        _, device = driver.cuDeviceGet(index)
        _, raw = driver.cuDeviceGetName(256, device)
        name = raw.split(b"\0")[0].decode()
        _, major = driver.cuDeviceGetAttribute(
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device
        )
        _, minor = driver.cuDeviceGetAttribute(
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device
        )
        _, memory = driver.cuDeviceTotalMem(device)
        if (major, minor) < MIN_COMPUTE:
            notes.append(f"{name} (device {index}) is left out: compute capability {major}.{minor}")
            continue
        devices.append(DeviceInfo(index, name, arch_name(major, minor), int(memory)))
    return tuple(devices), tuple(notes)
