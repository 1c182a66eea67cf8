"""The AMD backend: HIP sources, hiprtc or clang, hip-python; backends/README.md names its rooms."""

from __future__ import annotations

import os
from importlib import resources

from ark.backend.protocol import Probe
from ark.codegen.dialect import Dialect
from ark.machine import Machine
from ark_rocm import dialect, machines, probe
from ark_rocm.compiler import Compiler
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

    def default_arch(self) -> str:
        return "gfx942"

    def archs(self) -> tuple[str, ...]:
        return tuple(machines.ARCHS)

    def export_source(self) -> str:
        return resources.files("ark_rocm").joinpath("export.c").read_text()

    def open(self, index: int) -> Device:
        return Device(index)

    def predict(self, name: str) -> None:
        """See ark.backend.protocol.PredictingBackend; the emulator has the models."""
        os.environ[probe.VARIABLE] = f"emulated:{name}"
        probe.prepare()


backend = RocmBackend()
