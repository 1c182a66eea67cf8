"""The kernels of a plan on a device, and a launch that runs one behind the other.

Phases under different variants are different kernels, one behind the other in the device's queue:
counters, packets and positions go on from where the one before has left them. Called by the
executor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ark.backend.devices import BoxMapper, Grid, KernelDevice, Launch
from ark.backend.protocol import KernelBackend
from ark.codegen.dialect import BoxMap
from ark.machine import Machine
from ark.plan.serialize import machine_of
from ark.plan.types import Plan, PlanTensor
from ark.runtime import toolchain
from ark.runtime.program import Program, load


@dataclass
class Kernel:
    """The loop kernel of some phases, loaded. loaded: what Device.load returned."""

    phases: range
    machine: Machine
    program: Program
    loaded: object

    @cached_property
    def _grids(self) -> dict[int, Grid]:
        """Those that were asked for, by processors: a launch of microseconds asks each time."""
        return {}

    def grid(self, processors: int) -> Grid:
        """Its launch on so many processors. Where these have one thread, who moves is one more."""
        if processors not in self._grids:
            machine, shared_bytes = self.machine, self.program.emitted.scratch_bytes
            blocks = processors
            if machine.movers_apart:
                blocks = machine.with_processors(processors).lists
            made = Grid(blocks, machine.threads, shared_bytes + machine.ring_bytes)
            self._grids[processors] = made
        return self._grids[processors]


def load_kernels(plan: Plan, backend: KernelBackend, device: KernelDevice) -> list[Kernel]:
    """All kernels of a plan, in the order of its phases; none stays loaded where one fails."""
    toolchain.admit(backend, device)
    found: list[Kernel] = []
    try:
        for phases in plan.kernels:
            machine = machine_of(plan, phases[0])
            found.append(Kernel(phases, machine, *load(plan, machine, backend, device, phases)))
    except BaseException:
        for kernel in found:
            device.unload(kernel.loaded)
        raise
    return found


def opcodes(kernels: Sequence[Kernel]) -> list[int]:
    """By op, the number of its body in its kernel."""
    each = zip(*(k.program.emitted.opcode for k in kernels), strict=True)
    return [max(codes) for codes in each]


def box_maps(kernels: Sequence[Kernel]) -> list[tuple[BoxMap, ...]]:
    """By op, its box maps."""
    found: list[tuple[BoxMap, ...]] = [()] * len(kernels[0].program.emitted.opcode)
    for emitted in (k.program.emitted for k in kernels):
        for op, code in enumerate(emitted.opcode):
            if code >= 0 and emitted.maps:
                found[op] = emitted.maps[code]
    return found


def map_images(
    plan: Plan,
    maps: Sequence[Sequence[BoxMap]],
    device: KernelDevice,
    tensor_address: Callable[[PlanTensor], int],
    known: dict[int, tuple[int, bytes]],
) -> np.ndarray:
    """All box maps in the hardware's form, one op's behind the other's. known: by number, those
    that were made before, each with its matrix's address; what is made is added.
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
    """Launches the kernels that have something to do, the last one if none has.

    params: ArkParams of the first. ends: of the phases, in iterations. trace_bytes: how far apart
    the kernels' traces lie.
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
    """Kernels that follow each other in the device's queue, seen as one launch."""

    def __init__(self, each: Sequence[Launch]) -> None:
        self._each = each

    def done(self) -> bool:
        """True once all have left the device."""
        return all(launch.done() for launch in self._each)

    def wait(self, timeout_s: float | None = None) -> bool:
        """See Launch.wait."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for launch in self._each:
            if not launch.wait(None if end is None else max(0.0, end - time.monotonic())):
                return False
        return True

    def elapsed_ms(self) -> float:
        """Milliseconds on the device, without what lies between two kernels."""
        return sum(launch.elapsed_ms() for launch in self._each)
