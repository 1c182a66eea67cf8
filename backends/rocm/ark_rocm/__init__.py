"""The AMD backend. It emits HIP source, compiles it with hiprtc or clang, and calls the driver
through hip-python. backends/README.md lists its modules.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import resources
from types import ModuleType

from ark.backend.codegen.dialect import Dialect, Source
from ark.backend.devices import Binary
from ark.backend.occupancy import Occupancy
from ark.backend.protocol import KernelBackend, LoopFigures, Probe, Target, Toolchain
from ark.errors import SystemError
from ark.machine import Machine
from ark_rocm import code_object, dialect, machines, probe
from ark_rocm.compiler import Compiler, assembly, toolchain
from ark_rocm.device import Device


class RocmBackend:
    """AMD GPUs; see ark.backend.protocol.Backend."""

    name = "rocm"

    def probe(self) -> Probe:
        return probe.probe()

    def dialect(self, arch: str) -> Dialect:
        return dialect.dialect(arch)

    def machine(self, name: str) -> Machine | None:
        model = machines.MODELS.get(name)
        return machines.machine(name, model) if model else None

    def machine_names(self) -> tuple[str, ...]:
        return tuple(machines.MODELS)

    def compiler(self) -> Compiler:
        return Compiler()

    def toolchain(self, arch: str) -> Toolchain | None:
        """The compiler whose kernels are checked on a device before ark uses it
        (ark.backend.protocol). None for emulated devices, which need no check.
        """
        return None if os.environ.get(probe.VARIABLE) else toolchain(arch)

    def default_arch(self) -> str:
        return "gfx942"

    def archs(self) -> tuple[str, ...]:
        return tuple(machines.ARCHS)

    def occupancy(self, binary: Binary, target: Target, dynamic_bytes: int) -> Occupancy:
        """See ark.backend.protocol.OccupancyBackend."""
        return code_object.occupancy_of(binary.data, target, dynamic_bytes)

    def export_source(self) -> str:
        return resources.files("ark_rocm").joinpath("export.c").read_text()

    def open(self, index: int) -> Device:
        return Device(index)

    def predict(self, name: str) -> None:
        """Makes the emulator imitate the product `name`, such as an MI300X, and predict its launch
        times (ark.backend.protocol).
        """
        os.environ[probe.VARIABLE] = f"emulated:{name}"
        probe.prepare()

    def inspect(self, source: Source, arch: str) -> LoopFigures:
        """Compiles for `arch` and analyses the assembly of the loop that multiplies matrices, by
        the emulator's lint (ark.backend.protocol).
        """
        reader = _emulator("lint.matrix_loop")
        text = assembly(source, Target(arch, 0))
        figures: LoopFigures = reader.matrix_loop(text, arch, "ark_loop")
        return figures

    def counting(self, arch: str) -> AbstractContextManager[Callable[[], tuple[int, int]] | None]:
        """A context in which emulated devices of `arch` count their accesses to LDS, for `ark bench
        ops --isa` (ark.backend.protocol).
        """
        counters: AbstractContextManager[Callable[[], tuple[int, int]] | None]
        counters = _emulator("profile").counting(arch)
        return counters


def _emulator(name: str) -> ModuleType:
    """Imports a module of the emulator. Raises an error if the emulator is not installed."""
    try:
        return importlib.import_module(f"ark_rocm_emulator.{name}")
    except ImportError:
        raise SystemError(
            "reading AMD machine code needs the emulator: pip install ark-gpu-rocm-emulator"
        ) from None


def _backend() -> KernelBackend:
    """Returns the backend of AMD GPUs. If the environment variable ARK_ROCM_DEVICE is "shim",
    returns ShimBackend instead, with which `ark doctor` runs on an NVIDIA GPU.
    """
    if os.environ.get(probe.VARIABLE) != "shim":
        return RocmBackend()
    shim: KernelBackend = importlib.import_module("ark_rocm_emulator.shim.backend").backend
    return shim


backend = _backend()
