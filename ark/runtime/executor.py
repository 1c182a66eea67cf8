"""Runs one rank's plan on a device.

ark.runtime.loaded holds the loaded plan. A launch is a `Run`, which can be watched and waited for,
and which explains the error if a wait on the device times out. Called by ark.runtime.runner (the
ARK interface) and ark.models.generate.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark import log
from ark.backend.codegen import layout
from ark.backend.devices import Device, GraphDevice, Launch
from ark.backend.protocol import Backend
from ark.errors import GpuError, InvalidUsageError
from ark.machine.variant import COMMUNICATE
from ark.plan.serialize import machine_of
from ark.plan.types import ITERATION_BARRIER, Plan
from ark.runtime import live
from ark.runtime.faults import explain
from ark.runtime.kernels import launch_all
from ark.runtime.loaded import LoadedPlan
from ark.runtime.run import Ranks, Run

BUDGET_S = 10.0
MOST_BUDGET_S = 1e9  # limit, because nanoseconds must fit in 64 bits
# A persistent kernel leaves the device after IDLE_S seconds in which the host requests no work. The
# time is short, because other kernels (torch's) cannot start while it runs. Several ranks use
# IDLE_RANKS_S, because all of them have to leave and start again at the same time.
IDLE_S = 2.0
IDLE_RANKS_S = 600.0
MOST_ITERATIONS = (1 << 32) - 1


def counts_on(plan: Plan) -> bool:
    """True if a launch of the plan can begin without a reset of the counters, which then continue
    from the values of the previous launch (`Executor.resume`).
    """
    variant = machine_of(plan).variant
    return len(plan.phases) == 1 and not variant.ring_bytes and not variant.role(COMMUNICATE)


class Executor(LoadedPlan):
    """A plan that is loaded on one device, ready to launch. A context manager; `close` frees all
    memory.
    """

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        device: Device,
        *,
        ranks: Ranks | None = None,
        externals: Mapping[int, int] | None = None,
        trace_records: int = 0,
        budget_s: float = BUDGET_S,
    ) -> None:
        """externals: device addresses of external buffers, by buffer id. trace_records: the number
        of trace records per processor. budget_s: the most seconds that a wait on the device may
        take.

        Raises SystemError if memory or the compiler fails, before anything runs.
        """
        if not 0 < budget_s <= MOST_BUDGET_S:
            raise InvalidUsageError(
                f"budget_s={budget_s} is out of range; it must be above 0 and at most "
                f"{MOST_BUDGET_S:g}"
            )
        super().__init__(plan, backend, device, ranks, externals, trace_records)
        self.budget_s = budget_s
        self.phase_ends: list[int] = []
        self.latest: Run | None = None
        self.resumed: int | None = None  # iterations of `resume` so far
        self._params = np.zeros(1, layout.dtype("ArkParams"))
        self._usual: np.ndarray | None = None  # parameters of launches that do not continue

    def rebind(self, externals: Mapping[int, int]) -> None:
        """Changes the addresses of external buffers, given by buffer id. A running launch keeps its
        own tables. If there is no room for another set of tables, the launch is waited for.
        """
        moved = {n: a for n, a in externals.items() if a != self._externals[n]}
        if moved:
            if self._proxy is not None:
                for number, address in moved.items():
                    self._proxy.allow(address, self.plan.buffers[number].nbytes)
            self._tables.move(self._externals, moved, self.wait_idle)
        self._params["tasks"] = self._tables.arrays["tasks"].address
        self._usual = None

    @property
    def table(self) -> tuple[int, int]:
        """The address of the task table that is valid after `rebind`, and a number that changes
        when an older table is overwritten. See `use_table`.
        """
        return self._tables.arrays["tasks"].address, self._tables.replaced

    def use_table(self, address: int) -> None:
        """Lets later launches use a task table that an earlier `rebind` created. address: the
        address that `table` returned after that `rebind`. It is valid as long as the second value
        of `table` stays the same. The next `rebind` compares its addresses with those of the last
        `rebind`, not with those of this table.
        """
        self._params["tasks"] = address

    def wait_idle(self) -> None:
        """Waits for the running launch to end. Called before the tables that it uses are
        changed.
        """
        if self.latest is not None and self.latest.running():
            self.latest.wait()

    def start(self, iterations: int | Sequence[int], persistent: bool = False) -> Run:
        """Launches the loop kernel with a number of iterations for each phase, in the plan's order.

        A single number is for the last phase. persistent: the kernel runs until `Run.quit`, and
        `Run.release` allows it to execute iterations. Raises InvalidUsageError while the previous
        launch is running.
        """
        self._check_idle()
        each = self.phase_iterations(iterations)
        if persistent and len(self.kernels) > 1:
            raise InvalidUsageError(
                "the plan's phases are different kernels, which cannot run persistently; plan "
                "with the option variant='block'"
            )
        *self.phase_ends, _ = ends = list(itertools.accumulate(each))
        self._reset(ends, ordered=True)
        if self._usual is None:
            self._usual = self._parameters(persistent=False)
        self._usual["persistent"] = persistent
        return self._launch(self._usual, ends)

    def _check_idle(self) -> None:
        if self.latest is not None and self.latest.forked:
            raise InvalidUsageError(
                "the kernel was launched before this process was forked and runs only in the "
                "parent process; load the plan again in this process, or start processes with "
                "multiprocessing's 'spawn'"
            )
        if self.latest is not None and self.latest.running():
            raise InvalidUsageError(
                "the previous launch is still running; wait for it (Run.wait) or stop it (Run.stop)"
            )

    def resume(self, iterations: int = 1, stream: int | None = None) -> Run:
        """Launches a number of further iterations. Counters and packet epochs continue from their
        present values.

        Ranks do not synchronise at the launch, so it costs no more than a kernel launch. The
        iteration barrier keeps an iteration from overtaking the previous one on any rank. Only for
        plans of one phase without an operand stream, in the variants `block` and `matrix`. stream:
        a queue of the device on which to run; launches on one stream need no wait in between.
        Raises InvalidUsageError if the plan cannot continue or, without a stream, while the
        previous launch is running.
        """
        if stream is None:
            self._check_idle()
        self.resumable()
        if self.latest is not None:
            self.latest.detach()  # later launches report errors
        assert self.resumed is not None
        first, self.resumed = self.resumed, self.resumed + iterations
        self._params["first"], self._params["end"] = first, self.resumed
        return self._launch(self._params, [self.resumed], stream)

    def resumable(self) -> np.ndarray:
        """The parameters for a launch that continues from the previous one (`resume`). If the last
        launch was of another kind, all state is reset first, and iterations are counted from 0.
        """
        if self.resumed is None:
            self._check_counts_on()
            self._reset([MOST_ITERATIONS])
            self.resumed = 0
            self._params = self._parameters(persistent=False)
        return self._params

    def watched(self, launch: Launch) -> Run:
        """Registers a launch that ark.runtime.streams or .inline has started as this executor's
        latest launch, and returns its Run.
        """
        if self.latest is not None:
            self.latest.detach()
        assert self.resumed is not None
        return self._watch(launch, self.resumed)

    def _watch(self, launch: Launch, iterations: int) -> Run:
        trouble = self._proxy.error if self._proxy is not None else None
        self.latest = Run(
            launch, self._host_words, iterations, self.ranks, self.budget_s, self._explain, trouble
        )
        return self.latest

    def wake(self) -> None:
        """Announces to the proxy, if there is one, that requests will follow soon."""
        if self._proxy is not None:
            self._proxy.wake()

    def _check_counts_on(self) -> None:
        if not counts_on(self.plan):
            raise InvalidUsageError(
                "launches of this plan cannot continue from one another: it has several "
                "phases, a ring or roles (its kernel variant is "
                f"{self.machine.variant.name!r}); use Executor.start"
            )

    def record(self, iterations: int, stream: int) -> None:
        """Adds the plan's first `iterations` iterations to the graph of launches that is being
        captured on a stream (see ark.runtime.graphs). Only for plans that `resume` accepts.
        """
        self._check_counts_on()
        assert isinstance(self.device, GraphDevice)
        self._reset([MOST_ITERATIONS])
        params, kernel = self._parameters(persistent=False), self.kernels[0]
        params["end"] = iterations
        cleared = self.counters.ranges()
        packets = self._arenas.get("packet")
        if packets is not None:
            cleared.append((packets.address, packets.nbytes))
        grid = kernel.grid(self.plan.processors)
        self.device.record(kernel.loaded, params.tobytes(), grid, stream, cleared)

    def check(self) -> None:
        """Raises GpuError if a wait has timed out in a replay of a graph."""
        if int(self._host_words["error"][0]) != 0:
            raise GpuError(self._explain(self._host_words[0]))

    def _reset(self, ends: Sequence[int], ordered: bool = False) -> None:
        """Resets counters, packets and other state to their values before the first iteration. All
        ranks must call it at the same time. ordered: see `_clear`.
        """
        # A peer may signal counters of this rank until its own kernel has ended. So all ranks wait
        # for each other before the counters are reset.
        self._drain()
        self._meet("the end of the previous launch")
        self.resumed = None
        self._clear(ends, ordered)
        self._meet("the launch")

    def end(self) -> int:
        """The number of iterations of the last launch, which must have ended. It is smaller than
        requested if a task ended the loop (ark.sample), and 0 if the launch was aborted.
        """
        return self._control_word("limit")

    def _control_word(self, name: str) -> int:
        word = self.device.read(self._control.address + 4 * layout.word("ArkControl", name), 4)
        return int(word.view(np.uint32)[0])

    def _drain(self) -> None:
        """Waits until the proxy has served all requests of the previous launch."""
        if self._proxy is not None and self.latest is not None:
            self._proxy.drain(self._control_word("fifo_head"), self.budget_s)

    def _parameters(self, persistent: bool) -> np.ndarray:
        params = np.zeros(1, layout.dtype("ArkParams"))
        for name, memory in self._tables.arrays.items():
            params[name] = memory.address
        params["barrier"] = self.counter_address(ITERATION_BARRIER)
        params["control"] = self._control.address
        params["host"] = self._host.address
        params["trace"] = self._trace.address if self._trace else 0
        params["trace_capacity"] = self._trace_records
        params["fifo"] = self._proxy.fifo.address if self._proxy is not None else 0
        params["queue"] = self._queue.address if self._queue is not None else 0
        params["processors"] = self.plan.processors
        params["barrier_step"] = self.plan.counters[ITERATION_BARRIER].step
        params["peers"] = int(self.plan.counters[ITERATION_BARRIER].system)
        params["persistent"] = int(persistent)
        params["budget_ns"] = int(self.budget_s * 1e9)
        idle_s = IDLE_S if self.plan.world_size == 1 else IDLE_RANKS_S
        params["idle_ns"] = int(idle_s * 1e9)
        return params

    def _launch(self, params: np.ndarray, ends: Sequence[int], stream: int | None = None) -> Run:
        """Launches the kernels that have iterations to run. ends: for each phase, the number of its
        last iteration plus 1.
        """
        log.debug(f"launch of {len(self.kernels)} kernel(s), iterations up to {ends[-1]}")
        launch = launch_all(self.kernels, self.device, params, ends, self._trace_bytes, stream)
        self.wake()
        return self._watch(launch, ends[-1])

    def _explain(self, record: Any) -> str:
        return explain(
            self.plan,
            self.tables,
            record,
            self.counters.values(),
            self.phase_ends,
            self._peers.signallers,
        )

    def close(self, collective: bool = True) -> bool:
        """Stops what runs and frees everything. Idempotent.

        collective: if True, all ranks must call this. They first unmap each other's memory and
        synchronise, because a peer may write to it until then. Pass False after an error, when
        peers may not arrive and a lost device may refuse to free memory. Memory that peers may
        still write to then stays allocated until the process ends. Returns False, after a warning,
        if a kernel does not leave; then nothing is freed.
        """
        if self.latest is not None and not self.latest.stop():
            live.keep("a kernel did not leave its device after an abort", self)
            return False
        collective = collective and not (self.latest is not None and self.latest.forked)
        if self._peers.far and collective:  # peers' signals still pass through this rank's proxy
            self._drain()
            self._meet("the end of the previous launch")
        if self.latest is not None:
            self.latest.detach()
        self.latest = None
        self._release(collective)
        return True

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(collective=kind is None)
