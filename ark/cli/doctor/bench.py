"""A device that is opened for the doctor's checks, with the checks' kernel and memory. It runs one
launch at a time. Used by ark.cli.doctor.checks.
"""

from __future__ import annotations

import dataclasses
import time
from importlib import resources

import numpy as np

from ark.backend import registry
from ark.backend.codegen import device_text, layout
from ark.backend.codegen.constants import constants
from ark.backend.codegen.dialect import Source
from ark.backend.devices import Grid, Launch, Memory, MemoryKind
from ark.backend.protocol import Backend, KernelBackend, Target
from ark.errors import GpuError
from ark.machine import Machine
from ark.machine.variant import COMPUTE, block

WORD_STRIDE_BYTES = 128  # distance of words that different processors poll
CHECKS = ("meet", "message", "packets", "host", "clock", "add", "read")
BUDGET_S = 20.0


def source(machine: Machine, backend: KernelBackend) -> Source:
    """The source of the doctor's kernel, for a machine without a ring in shared memory. It consists
    of the prelude, the structures, the code for waits and reports, the checks, and the entry.
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
    """An opened device with the kernel that runs the checks of `ark doctor`. Usable as a context
    manager.
    """

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
        """Allocates zeroed memory, which is freed when the context ends."""
        memory = self.device.alloc(nbytes, kind)
        self.kept.append(memory)
        return memory

    def words(self, count: int, kind: MemoryKind = "device") -> Memory:
        """Allocates words for polling or atomic additions, each on a cache line of its own."""
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
        """Launches a check. data, words: addresses of the memory that the check uses. count: the
        number of 4-byte words at `data`. system: the memory scope of the check's atomics: True for
        the scope that includes peers and host, False for the device scope.
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
        """Waits for a launch to end. Returns its results, 16 words. Raises GpuError if the kernel
        does not end.
        """
        if not launch.wait(2 * BUDGET_S):
            raise GpuError(f"the kernel did not leave within {2 * BUDGET_S:.0f} s")
        return self.device.read(self.results.address, self.results.nbytes).view(np.uint32)

    def tell(self, number: int) -> bool:
        """Sends `number` to the running kernel of the check named `host`, by writing it to host
        memory. Returns True when the kernel has answered with the same number, and False if there
        is no answer within BUDGET_S seconds.
        """
        self.host_words["target"] = number
        deadline = time.monotonic() + BUDGET_S
        while self.host_words["done"] != number:
            if time.monotonic() > deadline:
                return False
        return True

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        """Frees everything, unless a kernel is still running and uses the memory. After a failed
        check, a kernel may run until its time budget ends.
        """
        if self.launched and not self.launched.wait(2 * BUDGET_S):
            return
        for memory in self.kept:
            self.device.free(memory)
        self.device.unload(self.program)
        self.device.close()
