"""Loads the kernels of a plan, and launches them in order.

Phases with different kernel variants need different kernels, which follow each other in the
device's queue. Counters, packets and positions continue from the previous kernel. Called by the
executor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ark.backend.codegen.body import BoxMap
from ark.backend.devices import BoxMapper, Grid, KernelDevice, Launch
from ark.backend.protocol import KernelBackend
from ark.machine import Machine
from ark.plan.serialize import machine_of
from ark.plan.types import Plan, PlanTensor
from ark.runtime import toolchain
from ark.runtime.program import Program, load


@dataclass
class Kernel:
    """The loaded loop kernel that runs consecutive phases. loaded: the result of Device.load."""

    phases: range
    machine: Machine
    program: Program
    loaded: object

    @cached_property
    def _grids(self) -> dict[int, Grid]:
        """A cache of launch grids by number of processors. A grid is needed at every launch, and
        building it would take a large part of a launch's time.
        """
        return {}

    def grid(self, processors: int) -> Grid:
        """The launch grid for a number of processors. On machines with one thread per block, the
        warps that only move data are additional blocks.
        """
        if processors not in self._grids:
            machine, shared_bytes = self.machine, self.program.emitted.scratch_bytes
            blocks = processors
            if not machine.cooperative:
                blocks = machine.with_processors(processors).lists
            grid = Grid(blocks, machine.threads, shared_bytes + machine.ring_bytes)
            self._grids[processors] = grid
        return self._grids[processors]


def load_kernels(plan: Plan, backend: KernelBackend, device: KernelDevice) -> list[Kernel]:
    """Loads all kernels of a plan, in the order of its phases. If one cannot be loaded, the others
    are unloaded.
    """
    toolchain.admit(backend, device)
    kernels: list[Kernel] = []
    try:
        for phases in plan.kernels:
            machine = machine_of(plan, phases[0])
            kernels.append(Kernel(phases, machine, *load(plan, machine, backend, device, phases)))
    except BaseException:
        for kernel in kernels:
            device.unload(kernel.loaded)
        raise
    return kernels


def opcodes(kernels: Sequence[Kernel]) -> list[int]:
    """For each op, the number by which its device function is selected in the kernel."""
    each = zip(*(k.program.emitted.opcode for k in kernels), strict=True)
    return [max(codes) for codes in each]


def box_maps(kernels: Sequence[Kernel]) -> list[tuple[BoxMap, ...]]:
    """For each op, its box maps (tensor maps for TMA)."""
    maps_of: list[tuple[BoxMap, ...]] = [()] * len(kernels[0].program.emitted.opcode)
    for emitted in (k.program.emitted for k in kernels):
        for op, code in enumerate(emitted.opcode):
            if code >= 0 and emitted.maps:
                maps_of[op] = emitted.maps[code]
    return maps_of


def map_images(
    plan: Plan,
    maps: Sequence[Sequence[BoxMap]],
    device: KernelDevice,
    tensor_address: Callable[[PlanTensor], int],
    known: dict[int, tuple[int, bytes]],
) -> np.ndarray:
    """All box maps (tensor maps for TMA) in the hardware's format, in the order of ops.
    known: a cache of the maps that exist already, by number, each with the address of its tensor
    and the hardware's format. New maps are added to it.
    """
    wanted = [(op, box) for op, boxes in zip(plan.ops, maps, strict=True) for box in boxes]
    for number, (op, box) in enumerate(wanted):
        assert isinstance(device, BoxMapper)
        address = tensor_address(plan.tensors[op.operands[box.operand]])
        if known.get(number, (None,))[0] != address:
            known[number] = address, device.box_map(box, address)
    images = b"".join(known[number][1] for number in range(len(wanted)))
    return np.frombuffer(images, np.uint8)


def launch_all(
    kernels: Sequence[Kernel],
    device: KernelDevice,
    params: np.ndarray,
    ends: Sequence[int],
    trace_bytes: int,
    stream: int | None,
) -> Launch:
    """Launches the kernels that have iterations to run; if none has, launches the last kernel.

    params: ArkParams of the first kernel. ends: for each phase, the number of its last iteration
    plus 1. trace_bytes: the distance between the traces of the kernels.
    """
    if len(kernels) == 1:
        return _launch(kernels[0], device, params, stream)
    begin = int(params["first"][0])
    launches: list[Launch] = []
    for number, kernel in enumerate(kernels):
        end, last = ends[kernel.phases[-1]], number == len(kernels) - 1
        if end == begin and not (last and not launches):
            continue
        given = params.copy()
        given["first"] = begin
        given["trace"] += number * trace_bytes
        if not last:
            given["end"] = end
        launches.append(_launch(kernel, device, given, stream))
        begin = end
    return launches[0] if len(launches) == 1 else Launches(launches)


def _launch(kernel: Kernel, device: KernelDevice, params: np.ndarray, stream: int | None) -> Launch:
    grid = kernel.grid(int(params["processors"][0]))
    return device.launch(kernel.loaded, params.tobytes(), grid, stream)


class Launches:
    """A launch that consists of several kernels, which follow each other in the device's queue."""

    def __init__(self, each: Sequence[Launch]) -> None:
        self._each = each

    def done(self) -> bool:
        """True once all kernels have left the device."""
        return all(launch.done() for launch in self._each)

    def wait(self, timeout_s: float | None = None) -> bool:
        """See Launch.wait."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for launch in self._each:
            if not launch.wait(None if end is None else max(0.0, end - time.monotonic())):
                return False
        return True

    def elapsed_ms(self) -> float:
        """The kernels' time on the device in milliseconds, without the gaps between them."""
        return sum(launch.elapsed_ms() for launch in self._each)
