"""A device that is opened for the doctor, with its kernel and memory. It runs one launch at a
time.
"""

from __future__ import annotations

import dataclasses
import time
from importlib import resources
from types import TracebackType

import numpy as np

from ark.backend import registry
from ark.backend.devices import Grid, Launch, Memory, MemoryKind
from ark.backend.protocol import Backend, KernelBackend, Target
from ark.codegen import device_text, layout
from ark.codegen.constants import constants
from ark.codegen.dialect import Source
from ark.errors import GpuError
from ark.machine import Machine
from ark.machine.variant import COMPUTE, block

WORD_STRIDE_BYTES = 128  # bytes between words that different processors poll
CHECKS = ("meet", "message", "packets", "host", "clock", "add", "read")
BUDGET_S = 20.0


def source(machine: Machine, backend: KernelBackend) -> Source:
    """The source of the doctor's kernel, for a machine without a ring: prelude, structures, the
    code for waits and reports, checks, entry.
    """
    dialect = backend.dialect(machine.arch)
    checks = resources.files("ark.cli.doctor").joinpath("checks.h").read_text()
    parts = (
        constants(machine, 1, layout.LOOP_BYTES),
        dialect.prelude,
        layout.declarations(),
        device_text("wait.h"),
        checks,
        dialect.entry,
    )
    return Source("\n".join(parts))


class Bench:
    """A device with the doctor's kernel. words: memory of the kind that counters use."""

    def __init__(self, chosen: Backend, index: int) -> None:
        self.backend = backend = registry.with_kernels(chosen)
        self.device = backend.open(index)
        machine = self.device.machine
        variant = block(machine.variant.role(COMPUTE))
        self.machine = dataclasses.replace(machine, variants=(variant,))
        target = Target(self.machine.arch, self.machine.threads)
        binary = backend.compiler().compile(source(self.machine, backend), target)
        self.program = self.device.load(binary)
        self.host = self.device.alloc(layout.dtype("ArkHost").itemsize, "host")
        assert self.host.host is not None
        self.host_words = self.host.host.view(layout.dtype("ArkHost"))[0]
        self.control = self.device.alloc(layout.dtype("ArkControl").itemsize, "device")
        self.results = self.device.alloc(64, "device")
        self.kept: list[Memory] = [self.host, self.control, self.results]
        self.launched: Launch | None = None

    @property
    def processors(self) -> int:
        return self.machine.processors

    def alloc(self, nbytes: int, kind: MemoryKind = "device") -> Memory:
        """Zeroed memory, freed at the end."""
        memory = self.device.alloc(nbytes, kind)
        self.kept.append(memory)
        return memory

    def words(self, count: int, kind: MemoryKind = "device") -> Memory:
        """Allocates words that are polled or added to, each on its own cache line."""
        return self.alloc(count * WORD_STRIDE_BYTES, kind)

    def start(
        self,
        check: str,
        data: int = 0,
        words: int = 0,
        count: int = 0,
        rounds: int = 1,
        system: bool = False,
        lasts_s: float = 0.0,
        processors: int = 0,
    ) -> Launch:
        """Launches a check. data, words: addresses. count: the number of 4-byte words of data.
        system: use the memory scope of peers and host.
        """
        self.device.zero(self.results.address, self.results.nbytes)
        assert self.host.host is not None
        self.host.host[:] = 0
        params = np.zeros(1, layout.dtype("ArkParams"))
        params["first"] = CHECKS.index(check)
        params["tasks"], params["counter_ops"] = data, words
        params["fetches"], params["control"] = self.results.address, self.control.address
        params["host"], params["trace_capacity"] = self.host.address, count
        params["processors"] = processors or self.processors
        params["barrier_step"], params["persistent"] = rounds, int(system)
        params["budget_ns"], params["idle_ns"] = int(BUDGET_S * 1e9), int(lasts_s * 1e9)
        grid = Grid(processors or self.processors, self.machine.threads, layout.LOOP_BYTES)
        self.launched = self.device.launch(self.program, params.tobytes(), grid)
        return self.launched

    def finish(self, launch: Launch) -> np.ndarray:
        """Waits for a launch. Returns its results, 16 words. Raises GpuError if the kernel does not
        end.
        """
        if not launch.wait(2 * BUDGET_S):
            raise GpuError(f"the kernel did not leave within {2 * BUDGET_S:.0f} s")
        return self.device.read(self.results.address, self.results.nbytes).view(np.uint32)

    def tell(self, number: int) -> bool:
        """Releases round `number` of a running `host` check. Returns True when the kernel has
        answered.
        """
        self.host_words["target"] = number
        deadline = time.monotonic() + BUDGET_S
        while self.host_words["done"] != number:
            if time.monotonic() > deadline:
                return False
        return True

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Frees everything except memory that a kernel still uses. After a failed check a kernel
        may run until its time budget ends.
        """
        if self.launched and not self.launched.wait(2 * BUDGET_S):
            return
        for memory in self.kept:
            self.device.free(memory)
        self.device.unload(self.program)
        self.device.close()
