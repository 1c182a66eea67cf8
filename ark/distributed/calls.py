"""Plans and runs collectives that are called outside of a model. Each call runs a plan of one op,
which is created once for each size and cached. The generated source does not depend on the size, so
one compiled kernel serves all sizes. The data are moved as bytes; only reductions depend on the
element type. Every rank creates the plans of all ranks, verifies them together, and loads its own
plan. Called by ark.distributed.group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ark.backend.devices import Device, InlineDevice, Memory
from ark.backend.protocol import Backend
from ark.collective.programs import Collective, CollectiveProgram
from ark.collective.programs.attributes import CollectiveAttributes
from ark.distributed.arrays import Array
from ark.errors import UnsupportedError
from ark.ir.dtype import uint8, uint32
from ark.ir.graph import Graph
from ark.lower.engines import AUTO, PACKET, choose_engine
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.variant import COMPUTE, block
from ark.ops.communication.collectives import choose_program
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from ark.runtime.inline import InlineRuns
from ark.runtime.run import Ranks

PROCESSOR_BYTES = 4 << 10  # bytes of packets for each processor of a small call
MAX_RESULT_BYTES = 1 << 30  # bytes of one call's result, because coordinates in a plan have 32 bits


@dataclass(frozen=True)
class Key:
    """The properties that determine a call's plan: calls with equal keys use one plan. elements:
    the number of elements in one rank's input.
    """

    collective: str
    element: str
    itemsize: int
    elements: int
    reduction: str | None = None
    root: int | None = None
    algorithm: str | CollectiveProgram = "auto"
    engine: str = AUTO

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize

    def out_bytes(self, world: int) -> int:
        """Bytes of the result on each rank."""
        if self.collective == Collective.ALL_GATHER:
            return self.nbytes * world
        if self.collective == Collective.REDUCE_SCATTER:
            return self.nbytes // world
        return self.nbytes


def moved(collective: Collective, x: Array, parts: int, root: int | None) -> Key:
    """The key of a call that moves data without reducing it. It has the number of bytes instead of
    the element type, so that few kernels are needed.
    """
    word = 4 if x.nbytes // parts % 4 == 0 else 1
    return Key(collective.value, f"uint{8 * word}", word, x.nbytes // word, None, root)


def check_size(key: Key, world: int) -> None:
    """Raises UnsupportedError if a rank's input or result exceeds MAX_RESULT_BYTES."""
    most = max(key.nbytes, key.out_bytes(world))
    if most > MAX_RESULT_BYTES:
        raise UnsupportedError(
            f"{key.collective} of {most} bytes on a rank exceeds the {MAX_RESULT_BYTES} bytes of "
            "one call: split the array into several calls"
        )


def algorithm(key: Key, world: int) -> str | CollectiveProgram:
    """The algorithm of a call. It is the algorithm of `key`, unless this is "auto". "auto" means
    two_shot for an all-reduce of more than 256 KiB over more than two ranks, and one_shot for all
    other calls.
    """
    if key.algorithm != "auto":
        return key.algorithm
    large = key.nbytes > (256 << 10) and world > 2
    return "two_shot" if large and key.collective == Collective.ALL_REDUCE else "one_shot"


def machine_for(device: Machine, world: int, key: Key) -> Machine:
    """The device's machine model with the kernel variant `block` only, and with no more processors
    than the data can keep busy.
    """
    plain = next(v for v in device.variants if v.name == "block")
    machine = dataclasses.replace(device, variants=(block(plain.role(COMPUTE)),))
    most = machine.processors
    if machine.has(Capability.STARTS_PROCESSORS):
        most = max(1, most // world) if key.nbytes >= 1 << 20 else 1
    moved = max(key.nbytes, key.out_bytes(world))
    small = choose_engine(machine, moved, key.engine).name == PACKET
    share = PROCESSOR_BYTES if small else 4 * PROCESSOR_BYTES
    return machine.with_processors(max(1, min(most, -(-moved // share))))


def plans_for(key: Key, world: int, device: Machine, hosts: Sequence[int] = ()) -> list[Plan]:
    """The verified plans of all ranks. hosts: the host number of each rank, which the planner takes
    as an option.
    """
    machine = machine_for(device, world, key)
    unit = uint32 if key.itemsize % 4 == 0 else uint8
    how = choose_program(
        key.collective, world, algorithm(key, world), None, key.root, key.reduction
    )
    given = CollectiveAttributes(program=how, element=key.element, engine=key.engine)
    attrs = given.to_node()
    plans = []
    for rank in range(world):
        graph = Graph(rank, world)
        x, y = (
            graph.tensor((nbytes // unit.itemsize,), unit, arena="external", name=name)
            for name, nbytes in (("x", key.nbytes), ("y", key.out_bytes(world)))
        )
        graph.add("collective", [x], [y], attrs, key.collective)
        # All ranks synchronise in every call: one barrier takes less time than one wait per peer.
        plans.append(make_plan(graph, machine, {"hosts": hosts, "lockstep": True}))
    verify(plans)
    return plans


class Call:
    """A loaded plan of one collective, ready to run. It has its own device memory for input and
    result, which is used if the caller's arrays are not registered.
    """

    def __init__(
        self, key: Key, ranks: Ranks, rank: int, world: int, backend: Backend, device: Device,
        budget_s: float, hosts: Sequence[int] = (),
    ) -> None:  # fmt: skip
        plan = plans_for(key, world, device.machine, hosts)[rank]
        self._views: dict[tuple[type, int], Any] = {}
        self.key, self.device = key, device
        self.source = device.alloc(key.nbytes, "device")
        self.target = device.alloc(key.out_bytes(world), "device")
        externals = self._externals(plan, self.source.address, self.target.address)
        self._bound = externals
        try:
            self.executor = Executor(
                plan, backend, device, ranks=ranks, externals=externals, budget_s=budget_s
            )
        except BaseException:
            self._free()
            raise
        self._begin()

    @staticmethod
    def _externals(plan: Plan, source: int, target: int) -> dict[int, int]:
        places = {"x": source, "y": target}
        return {b.id: places[b.name] for b in plan.buffers if b.arena == "external"}

    def bind(self, source: int | None, target: int | None) -> None:
        """Sets the addresses of input and result. None means the call's own memory."""
        source = self.source.address if source is None else source
        target = self.target.address if target is None else target
        externals = self._externals(self.executor.plan, source, target)
        if externals != self._bound:
            self.executor.rebind(externals)
            self._bound = externals

    def _begin(self) -> None:
        device, executor = self.device, self.executor
        self._inline = InlineRuns(executor) if isinstance(device, InlineDevice) else None

    def restart(self) -> None:
        """Ends running launches and resets the counters of iterations, so that the next call starts
        like the first. All ranks of the call must do the same.
        """
        if self.executor.latest is not None:
            self.executor.latest.stop()
        self.executor.resumed = None
        self._begin()

    def view(self, array: Array, memory: Memory) -> Any:
        """A view of this call's device memory for `array`, whose write_to and read_from take such
        views. The view is created once and cached.
        """
        key = (type(array), memory.address)
        if key not in self._views:
            self._views[key] = array.view(memory)
        return self._views[key]

    def run(self, stream: int | None = None) -> None:
        """Runs the collective once. With a stream it is only queued; otherwise the method returns
        when it has ended.
        """
        if stream is not None:
            self.executor.check()
            self.executor.resume(1, stream)
        elif self._inline is not None:
            self._inline()
        else:
            self.executor.resume(1).wait()

    def close(self, collective: bool) -> None:
        if self.executor.close(collective):
            self._free()

    def _free(self) -> None:
        for memory in (self.source, self.target):
            self.device.free(memory)
