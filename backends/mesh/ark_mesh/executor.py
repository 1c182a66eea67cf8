"""Runs a plan on the mesh: copies the host's memory to the cores, runs supersteps, and copies the
results back. It has the interface of ark.runtime.executor.Executor, without the counters and tables
of a loop kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.backend.codegen import layout
from ark.backend.devices import Grid
from ark.errors import InvalidUsageError, UnsupportedError
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.runtime import program
from ark.runtime.executor import BUDGET_S, IDLE_S, MOST_ITERATIONS
from ark.runtime.faults import explain
from ark.runtime.memory import PlanMemory
from ark.runtime.run import Run
from ark_mesh.device import MeshDevice
from ark_mesh.exchange import Exchange
from ark_mesh.kernels import MeshKernels
from ark_mesh.private import Cores

_ADDRESSES = (
    "cores",
    "steps",
    "tasks",
    "exchanges",
    "messages",
    "inputs",
    "outputs",
    "ends",
    "posts",
    "post_ends",
    "copies",
    "staging",
    "remembered",
    "control",
    "host",
    "counts",
    "idle_ns",
)
_WORDS = ("count", "phases", "persistent", "first", "input_count", "copy_count")
PARAMS = np.dtype([*((n, "<u8") for n in _ADDRESSES), *((n, "<u4") for n in _WORDS)])


class MeshExecutor(PlanMemory):
    """A plan that is loaded on the simulated mesh. A context manager; `close` frees all memory."""

    def __init__(
        self,
        plan: Plan,
        device: MeshDevice,
        *,
        externals: Mapping[int, int] | None = None,
        trace_records: int = 0,
        budget_s: float = BUDGET_S,
    ) -> None:
        """Takes the arguments of ark.runtime.executor.Executor. Raises UnsupportedError for plans
        that need shared memory and for plans of several ranks.
        """
        _check(plan, trace_records)
        super().__init__(plan, device, externals)
        self.machine = machine_of(plan)
        self._budget_s = budget_s
        self.latest: Run | None = None
        self._resumed: int | None = None
        self._phase_ends: list[int] = []
        self.exchange = Exchange(plan)
        self.program, loaded = program.load(plan, self.machine, MeshKernels(), device.host)
        self._loaded: object | None = loaded
        self._processor = device.host
        try:
            self._allocate(device)
        except BaseException:
            self.close()
            raise

    def _allocate(self, device: MeshDevice) -> None:
        self._allocate_arenas()
        self.cores = Cores(self.plan, self.exchange, device)
        self._memory += self.cores.own
        self._host = self._alloc(layout.dtype("ArkHost").itemsize, "host")
        assert self._host.host is not None
        self._control = layout.control(0, [0] * (len(self.plan.phases) - 1))
        count = self.plan.processors
        self._controls = np.tile(self._control, (count, 1))
        self._hosts = np.zeros(count, layout.dtype("ArkHost"))
        opcode = self.program.emitted.opcode
        self._tables = [self.cores.tables(core, opcode) for core in range(count)]
        self._core_params = np.zeros(count, layout.dtype("ArkParams"))
        for core, tables in enumerate(self._tables):
            own = self._core_params[core : core + 1]
            for name in ("tasks", "counter_ops", "fetches", "growths", "ranges"):
                own[name] = getattr(tables, name).ctypes.data
            own["control"] = self._controls[core:].ctypes.data
            own["host"] = self._hosts[core:].ctypes.data
            own["processors"] = 1
        self._params = np.zeros(1, PARAMS)
        self._arrays: dict[str, np.ndarray] = {}
        self._lay_out()
        self._bind()

    def _lay_out(self) -> None:
        """Prepares everything that does not depend on addresses in the host's memory."""
        phases = self.exchange.phases
        every = [messages for steps in phases for messages in steps.exchanges]
        records = [self.cores.messages(messages) for messages in every]
        self._counts = np.zeros(2, np.uint64)
        self._set("counts", self._counts)
        self._set("cores", self._core_params)
        self._set("steps", np.array([len(steps.exchanges) for steps in phases], np.uint32))
        self._set("tasks", self.cores.bounds())
        self._set("exchanges", _ends(records))
        self._set("messages", np.concatenate(records))
        largest = max(int(each["bytes"].sum()) for each in records)
        self._set("staging", np.zeros(max(1, largest), np.uint8))
        copies = self.cores.transfers(self.exchange.shared, None, out=True)
        self._set("copies", copies)
        params = self._params
        params["control"], params["host"] = self._control.ctypes.data, self._host.address
        params["remembered"] = self.cores.remembered
        params["count"], params["phases"] = self.plan.processors, len(phases)
        params["copy_count"], params["idle_ns"] = len(copies), int(IDLE_S * 1e9)

    def _bind(self) -> None:
        """Builds the messages between the cores and the host for the current addresses of the
        host's memory.
        """
        own = {b.id: self.buffer_address(b.id) for b in self.plan.buffers}
        inputs = self.cores.transfers(self.cores.initial(), own, out=False)
        self._set("inputs", inputs)
        self._params["input_count"] = len(inputs)
        mapped = {b.id for b in self.plan.buffers if b.arena == "host"}
        written = [steps.written for steps in self.exchange.phases]
        posts = [[piece for piece in each if piece.buffer in mapped] for each in written]
        for name, ends, pieces in (("outputs", "ends", written), ("posts", "post_ends", posts)):
            transfers = [self.cores.transfers(each, own, out=True) for each in pieces]
            self._set(name, np.concatenate(transfers))
            self._set(ends, _ends(transfers))

    def _set(self, name: str, array: np.ndarray) -> None:
        self._arrays[name] = array
        self._params[name] = array.ctypes.data

    def rebind(self, externals: Mapping[int, int]) -> None:
        """Moves external buffers, given by id, to other addresses. No launch may be running."""
        self._externals.update(externals)
        self._bind()

    def start(self, iterations: int | Sequence[int], persistent: bool = False) -> Run:
        """Runs the given number of iterations of each phase, in the plan's order; see
        Executor.start.
        """
        self._check_idle()
        ends = list(itertools.accumulate(self.phase_iterations(iterations)))
        self._resumed = None
        return self._launch(0, ends, persistent)

    def resume(self, iterations: int = 1, stream: int | None = None) -> Run:
        """Runs further iterations, whose numbers continue those of the previous launch; see
        Executor.resume.
        """
        if len(self.plan.phases) != 1:
            raise InvalidUsageError(
                "launches of a plan with several phases cannot continue from one another"
            )
        self._check_idle()
        first = self._resumed or 0
        self._resumed = first + iterations
        return self._launch(first, [self._resumed], persistent=False)

    def _check_idle(self) -> None:
        if self.latest is not None and self.latest.running():
            raise InvalidUsageError(
                "the previous launch is still running; wait for its end or stop it (Run.stop)"
            )

    def _launch(self, first: int, ends: list[int], persistent: bool) -> Run:
        assert self._host.host is not None
        if self.latest is not None:
            self.latest.detach()
        self._host.host[:] = 0
        self._hosts[:] = np.zeros(1, self._hosts.dtype)
        self._control[:] = layout.control(min(ends[-1], MOST_ITERATIONS), ends[:-1])
        self._controls[:] = self._control
        self._phase_ends = ends[:-1]
        self._params["persistent"], self._params["first"] = int(persistent), first
        launch = self._processor.launch(self._loaded, self._params.tobytes(), Grid(1, 1, 0))
        self.latest = Run(
            launch,
            self._host.host.view(layout.dtype("ArkHost")),
            ends[-1],
            None,
            self._budget_s,
            self._explain,
        )
        return self.latest

    def _explain(self, record: Any) -> str:
        tables = self._tables[int(record["error_processor"])]
        return explain(self.plan, tables, record, [], self._phase_ends, {})

    def end(self) -> int:
        """The number of iterations of the last launch; see Executor.end."""
        head = layout.dtype("ArkControl")
        return int(self._control[: head.itemsize // 4].view(head)["limit"][0])

    @property
    def supersteps(self) -> int:
        """The number of supersteps since the plan was loaded."""
        return int(self._counts[0])

    @property
    def exchanged(self) -> int:
        """The bytes that cores have exchanged since the plan was loaded."""
        return int(self._counts[1])

    def close(self, collective: bool = True) -> bool:
        """Stops a running launch and frees everything; safe to call twice. Returns False if the
        launch does not stop.
        """
        if self.latest is not None:
            if not self.latest.stop():
                return False
            self.latest.detach()
        self.latest = None
        own, self._memory = self._memory, []
        self._free(own, collective)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._processor.unload(loaded)
        return True

    def __enter__(self) -> MeshExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ends(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The offset of each part in the concatenation of all parts, followed by the total length."""
    return np.array([0, *itertools.accumulate(len(part) for part in parts)], np.uint32)


def _check(plan: Plan, trace_records: int) -> None:
    """Raises UnsupportedError if the plan uses features that a mesh of private memories lacks."""
    if plan.world_size > 1:
        raise UnsupportedError(
            f"the plan is for {plan.world_size} ranks; the backend 'mesh' runs one. Use another "
            "backend for several ranks"
        )
    if trace_records:
        raise UnsupportedError(
            "the backend 'mesh' keeps no trace of tasks; trace the plan on another backend"
        )
    kinds = sorted({op.kind for op in plan.ops if op.kind == "transfer"})
    packets = [t.name for t in plan.tensors if t.packet]
    if kinds or packets:
        raise UnsupportedError(
            "the backend 'mesh' has no memory that cores share, which the plan needs for "
            + ", ".join([*kinds, *(f"the packets {name!r}" for name in packets[:3])])
            + "; plan for a machine mesh-N"
        )
