"""The CPU backend. Each processor of a plan is a thread. It supports everything that a GPU backend
supports.
"""

from __future__ import annotations

from importlib import resources

from ark.backend.codegen.dialect import Dialect
from ark.backend.devices import KernelDevice
from ark.backend.protocol import Probe
from ark.machine import Machine
from ark_cpu import machines
from ark_cpu.compiler import FLAGS, CpuCompiler
from ark_cpu.device import CpuDevice
from ark_cpu.dialect import dialect
from ark_cpu.probe import probe


class CpuBackend:
    """The backend object that the package's entry point names. It has no state."""

    name = "cpu"

    def probe(self) -> Probe:
        return probe()

    def dialect(self, arch: str) -> Dialect:
        return dialect()

    def machine(self, name: str) -> Machine | None:
        return machines.by_name(name)

    def machine_names(self) -> tuple[str, ...]:
        return ("cpu-N",)

    def compiler(self) -> CpuCompiler:
        return CpuCompiler()

    def default_arch(self) -> str:
        return machines.host_arch()

    def archs(self) -> tuple[str, ...]:
        return (machines.host_arch(),)

    def source_flags(self) -> tuple[str, ...]:
        return FLAGS

    def export_source(self) -> str:
        return resources.files("ark_cpu").joinpath("export.c").read_text()

    def open(self, index: int) -> KernelDevice:
        return CpuDevice(index)


backend = CpuBackend()
