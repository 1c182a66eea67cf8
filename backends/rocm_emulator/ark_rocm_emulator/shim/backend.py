"""Runs the ROCm dialect's synchronisation on an NVIDIA GPU, with `ARK_ROCM_DEVICE=shim`.

`ark doctor --backend rocm` then uses an NVIDIA GPU. The doctor's kernel contains the unmodified
ROCm prelude with its fences, scopes, polls and packets. NVRTC compiles it through the shim, and the
CUDA backend's device runs it. This tests the prelude's synchronisation between blocks, processes
and the host on hardware with a weak memory model. It does not test AMD's code generation, memory or
driver. Only the doctor can use this backend, because it has no task bodies.
"""

from __future__ import annotations

import dataclasses
import importlib
from importlib import resources
from typing import Any

from ark.backend.codegen.dialect import Dialect
from ark.backend.devices import KernelDevice
from ark.backend.protocol import Compiler, Probe
from ark.errors import SystemError
from ark.machine import Machine

from . import HEADER

NOTE = (
    "NVIDIA GPUs behind the ROCm dialect: its synchronisation compiled by NVRTC through the shim; "
    "this shows nothing of AMD hardware"
)
# The parts of the prelude that synchronise processors. The prelude's arithmetic uses clang's
# builtins and is omitted, because the doctor does not need it.
HANDING_OVER = ("prelude.h", "lanes.h", "order.h")
ENTRY = """
extern "C" __global__ void __launch_bounds__(ARK_THREADS, 1)
    ark_loop(const __grid_constant__ ArkParams given) {
  __shared__ ArkParams params;
  if (threadIdx.x == 0) params = given;
  __syncthreads();
  ark_run(&params, blockIdx.x, ark_lds);
}
"""


def prelude() -> str:
    """The synchronisation code of the ROCm prelude, to be compiled after the shim's header."""
    more = HEADER.with_name("prelude_on_nvrtc.h").read_text()
    own = "".join((resources.files("ark_rocm") / name).read_text() for name in HANDING_OVER)
    return f"{more}constexpr unsigned ARK_TICKS_NS = 1;\n{own}"


class ShimBackend:
    """The CUDA backend with the ROCm dialect. See ark.backend.protocol.KernelBackend."""

    name = "rocm"

    def __init__(self) -> None:
        try:
            self._cuda: Any = importlib.import_module("ark_cuda").backend
        except ImportError as error:
            raise SystemError(
                f"the shim runs on the CUDA backend, which cannot be imported ({error}); install "
                "it with `pip install 'ark-gpu[cuda]'`"
            ) from error

    def probe(self) -> Probe:
        probed: Probe = self._cuda.probe()
        return dataclasses.replace(probed, notes=(NOTE, *probed.notes), simulated=True)

    def dialect(self, arch: str) -> Dialect:
        dialect: Dialect = self._cuda.dialect(arch)
        text = HEADER.read_text().replace("#pragma once\n", "") + prelude()
        return dataclasses.replace(
            dialect, name=self.name, suffix=".hip", prelude=text, entry=ENTRY, bodies=()
        )

    def machine(self, name: str) -> Machine | None:
        machine: Machine | None = self._cuda.machine(name)
        return machine

    def machine_names(self) -> tuple[str, ...]:
        return tuple(self._cuda.machine_names())

    def compiler(self) -> Compiler:
        compiler: Compiler = self._cuda.compiler()
        return compiler

    def default_arch(self) -> str:
        return str(self._cuda.default_arch())

    def archs(self) -> tuple[str, ...]:
        return tuple(self._cuda.archs())

    def open(self, index: int) -> KernelDevice:
        device: KernelDevice = self._cuda.open(index)
        return device


backend = ShimBackend()
