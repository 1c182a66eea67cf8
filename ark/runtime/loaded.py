"""One rank's plan on a device, ready to launch: its kernels, memory, counters, tables and
connections to peers. The class Executor of ark.runtime.executor derives from it and adds launches.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from ark.backend import registry
from ark.backend.codegen import layout
from ark.backend.devices import Device, KernelDevice, OrderedDevice
from ark.backend.protocol import Backend
from ark.errors import InvalidUsageError
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.runtime.copy_queue import CopyQueue, copy_queue
from ark.runtime.counters import Counters, counter_bytes
from ark.runtime.device_tables import DeviceTables
from ark.runtime.kernels import load_kernels
from ark.runtime.memory import PlanMemory, tolerated
from ark.runtime.peers import Peers
from ark.runtime.program import Program
from ark.runtime.proxy import Proxy
from ark.runtime.run import Ranks
from ark.runtime.tables import Tables

LIMIT_WORD = layout.word("ArkControl", "limit")


def packet_ranges(plan: Plan) -> list[tuple[int, int]]:
    """For each phase, the range of bytes in the packet arena that contains all of the phase's
    packets. A launch clears the ranges of its phases, because it numbers iterations (the packets'
    epochs) from the beginning.
    """
    if not plan.arenas.get("packet"):
        return []
    ranges: list[tuple[int, int]] = []
    for phase in plan.phases:
        ops = {task.op for tasks in phase.processors for task in tasks}
        numbers = {plan.tensors[t].buffer for op in ops for t in plan.ops[op].operands}
        own = [b for b in map(plan.buffers.__getitem__, numbers) if b.arena == "packet"]
        begin = min((b.offset for b in own), default=0)
        ranges.append((begin, max((b.offset + b.nbytes for b in own), default=begin)))
    return ranges


class LoadedPlan(PlanMemory):
    """A plan's kernels and all memory that they use."""

    device: KernelDevice

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        device: Device,
        ranks: Ranks | None,
        externals: Mapping[int, int] | None,
        trace_records: int,
    ) -> None:
        if plan.world_size > 1 and ranks is None:
            raise InvalidUsageError(
                f"the plan is for {plan.world_size} ranks, but this process is a single rank; "
                f"start it with `--ranks {plan.world_size}`, ark.launch or torchrun"
            )
        chosen = registry.with_kernels(backend)
        assert isinstance(device, KernelDevice)
        super().__init__(plan, device, externals)
        self.ranks = ranks
        # The device, if it can execute host copies in the order of its launch queue. None if there
        # are several ranks: they synchronise before a launch, and copies must have ended before
        # that.
        self._ordered: OrderedDevice | None = None
        if ranks is None and isinstance(device, OrderedDevice):
            self._ordered = device
        self.machine = machine_of(plan)
        self._proxy: Proxy | None = None
        self._queue: CopyQueue | None = None
        self._peers = Peers.of(plan)
        self.kernels = load_kernels(plan, chosen, device)
        try:
            self._allocate(trace_records)
        except BaseException:
            self._release(collective=False)
            raise

    @property
    def program(self) -> Program:
        """The compiled kernel of the last phase."""
        return self.kernels[-1].program

    def _allocate(self, trace_records: int) -> None:
        plan = self.plan
        self._allocate_arenas(elsewhere=("symmetric",))
        symmetric = plan.arenas.get("symmetric", 0)
        kind = "symmetric" if plan.world_size > 1 else "device"
        self._shared = self._alloc(symmetric + counter_bytes(plan, self.machine), kind)
        shared = self._shared.address + symmetric
        self.counters = Counters(plan, self.machine, self.device, shared, self._alloc)
        # Clears the buffers that receive packets. They may contain packets of an earlier launch.
        received = {t.buffer for t in plan.tensors if t.packet}
        own = (b for b in plan.buffers if b.arena == "symmetric" and b.rank == plan.rank)
        ends = (b.offset + b.nbytes for b in own if b.id in received)
        self._received_bytes = max(ends, default=0)
        self._host = self._alloc(layout.dtype("ArkHost").itemsize, "host")
        assert self._host.host is not None
        self._host_words = self._host.host.view(layout.dtype("ArkHost"))
        variants = {kernel.machine.variant.name for kernel in self.kernels}
        self._queue = copy_queue(plan, self.device, bool(self._peers.far))
        if self._queue is None:
            self._proxy = self._peers.proxy(self.device, variants, self._host)
        self._connect(symmetric)
        self._allow()
        # The tables get a weak reference to the executor. With an ordinary one, the two would form
        # a cycle, and an unused executor would not be freed at once.
        own = weakref.proxy(self)
        self._tables = DeviceTables(
            plan,
            self.kernels,
            self.device,
            lambda nbytes: own._alloc(nbytes),
            lambda tensor: own.tensor_address(tensor),
            lambda buffer: own.buffer_address(buffer),
            lambda counter: own.counter_address(counter),
            self.counters.own,
        )
        self._packets = packet_ranges(plan)
        self._begun = layout.control(0, [0] * (len(plan.phases) - 1))  # at the begin of a launch
        self._control = self._alloc(self._begun.nbytes)
        self._trace_records = trace_records
        self._trace_bytes = trace_records * plan.lists * layout.dtype("ArkTrace").itemsize
        traced = self._trace_bytes * len(self.kernels)
        self._trace = self._alloc(traced) if traced else None

    def _allow(self) -> None:
        """Registers with the proxy all memory that copy requests of the kernel may refer to."""
        if self._proxy is None:
            return
        for memory in (*self._arenas.values(), self._shared, *self._peers.near):
            self._proxy.allow(memory.address, memory.nbytes)
        for number, address in self._externals.items():
            self._proxy.allow(address, self.plan.buffers[number].nbytes)

    @property
    def tables(self) -> Tables:
        """The tables of the plan, equal to those on the device."""
        return self._tables.host

    def _connect(self, symmetric: int) -> None:
        """Gets the addresses of the peers' buffers and counters."""
        if self.ranks is not None and self.plan.world_size > 1:
            counters = {
                c.name: symmetric + c.id * self.machine.line_bytes
                for c in self.plan.counters
                if c.rank == self.plan.rank and c.system
            }
            self._peers.connect(self.ranks, self.device, self._proxy, self._shared, counters)

    def buffer_address(self, buffer_id: int) -> int:
        """The device address of a buffer of the plan."""
        buffer = self.plan.buffers[buffer_id]
        if buffer.rank != self.plan.rank:
            return self._peers.address(buffer.rank, "buffers", buffer.name)
        if buffer.arena == "symmetric":
            return self._shared.address + buffer.offset
        return super().buffer_address(buffer_id)

    def counter_address(self, counter: int) -> int:
        """The device address of a counter of the plan."""
        entry = self.plan.counters[counter]
        if entry.rank != self.plan.rank:
            return self._peers.address(entry.rank, "counters", entry.name)
        return self.counters.address(entry)

    def trace(self) -> list[np.ndarray]:
        """The trace records of the last run, in one array per processor."""
        if self._trace is None:
            raise InvalidUsageError("tracing is off; create the executor with trace_records > 0")
        kind = layout.dtype("ArkTrace")
        data = self.device.read(self._trace.address, self._trace.nbytes).view(kind)
        rows = data.reshape(len(self.kernels), self.plan.lists, self._trace_records)
        return [row[row["end"] != 0] for row in np.concatenate(rows, axis=1)]

    def prepare(self, address: int, data: np.ndarray) -> None:
        """Writes device memory before the next `Executor.start`, while nothing runs. The host need
        not wait for the copy; the array may be changed after the return.
        """
        write = self.device.write if self._ordered is None else self._ordered.enqueue_write
        write(address, data)

    def _clear(self, ends: Sequence[int], ordered: bool) -> None:
        """Resets memory to the state before the first iteration. ends: for each phase, the number
        of its last iteration plus 1. ordered: True if the next launch is queued on the device after
        this reset, so that the host need not wait for it.
        """
        zero, write = self.device.zero, self.device.write
        if ordered and self._ordered is not None:
            zero, write = self._ordered.enqueue_zero, self._ordered.enqueue_write
        for address, nbytes in self.counters.ranges():
            zero(address, nbytes)
        for (begin, end), first, last in zip(self._packets, (0, *ends), ends, strict=False):
            if first != last:
                zero(self._arenas["packet"].address + begin, end - begin)
        if self._received_bytes:
            zero(self._shared.address, self._received_bytes)
        if self._trace is not None:
            zero(self._trace.address, self._trace.nbytes)
        self._begun[LIMIT_WORD] = ends[-1]
        self._begun[len(self._begun) - len(ends) + 1 :] = ends[:-1]
        write(self._control.address, self._begun.view(np.uint8))
        assert self._host.host is not None
        self._host.host[:] = 0
        if self._proxy is not None:
            self._proxy.restart()
        if self._queue is not None:
            self._queue.restart()

    def _meet(self, awaited: str) -> None:
        if self.ranks is not None and self.plan.world_size > 1:
            self.ranks.barrier(awaited)

    def _release(self, collective: bool) -> None:
        """Frees everything; collective: see Executor.close."""
        if self._proxy is not None:
            self._proxy.close()
            self._proxy = None
        if self._queue is not None:
            with contextlib.suppress(*tolerated(collective)):
                self._queue.close()
            self._queue = None
        peers, own = self._peers.clear(), self._memory
        if peers and not collective:
            own = [m for m in own if m.kind != "symmetric"]
        self._memory = []
        kernels, self.kernels = self.kernels, []
        try:
            self._free(peers, collective)
            if peers and collective:
                self._meet("the end")
        finally:
            self._free(own, collective)
            for kernel in kernels:
                with contextlib.suppress(*tolerated(collective)):
                    self.device.unload(kernel.loaded)
