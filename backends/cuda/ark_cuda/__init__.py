"""The cuda backend of ark: NVIDIA GPUs through the driver API and NVRTC.

ark.backend loads the object `backend` through the entry point. Importing this package needs no GPU,
driver or cuda-python. They are needed only to open a device or to compile.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from ark.backend.codegen.dialect import Dialect
from ark.backend.devices import Binary, Device
from ark.backend.occupancy import Occupancy
from ark.backend.protocol import Backend, Compiler, Probe, Target, Toolchain
from ark.machine import Machine
from ark_cuda import dialect, footprint, machines, probe

if TYPE_CHECKING:
    from ark_cuda.device import CudaDevice


class CudaBackend:
    """The backend object: NVIDIA GPUs of compute capability 8.0 and later."""

    name = "cuda"

    def probe(self) -> Probe:
        return probe.probe()

    def dialect(self, arch: str) -> Dialect:
        return dialect.dialect(arch)

    def machine(self, name: str) -> Machine | None:
        return machines.by_name(name)

    def machine_names(self) -> tuple[str, ...]:
        return machines.names()

    def compiler(self) -> Compiler:
        from ark_cuda.compiler import NvrtcCompiler

        return NvrtcCompiler()

    def toolchain(self, arch: str) -> Toolchain | None:
        """See ark.backend.protocol.CheckedBackend."""
        from ark_cuda.compiler import toolchain

        return toolchain(arch)

    def default_arch(self) -> str:
        return "sm_90a"

    def archs(self) -> tuple[str, ...]:
        return ("sm_80", "sm_90a", "sm_100a", "sm_120")

    def occupancy(self, binary: Binary, target: Target, dynamic_bytes: int) -> Occupancy:
        """See ark.backend.protocol.OccupancyBackend."""
        return footprint.occupancy_of(binary.log, target, dynamic_bytes)

    def export_source(self) -> str:
        return resources.files("ark_cuda").joinpath("export.c").read_text()

    def open(self, index: int) -> CudaDevice:
        from ark_cuda.device import CudaDevice

        return CudaDevice(index)


backend: Backend = CudaBackend()

__all__ = ["CudaBackend", "Device", "backend"]
