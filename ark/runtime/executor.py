"""Runs one rank's plan on a device.

What is loaded for it is in ark.runtime.loaded; a launch is a `Run` that can be watched, waited for
and, when a wait ran out of its budget, explained. Called by ark.runtime.runner (the ARK interface)
and ark.models.generate.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark import log
from ark.backend.devices import Device, GraphDevice, Launch
from ark.backend.protocol import Backend
from ark.codegen import layout
from ark.errors import GpuError, InvalidUsageError
from ark.plan.serialize import machine_of
from ark.plan.types import ITERATION_BARRIER, Plan
from ark.runtime import live
from ark.runtime.faults import explain
from ark.runtime.kernels import launch_all
from ark.runtime.loaded import LoadedPlan
from ark.runtime.run import Ranks, Run
from ark.variant import COMMUNICATE

BUDGET_S = 10.0
MOST_BUDGET_S = 1e9  # in nanoseconds, it must fit 64 bits
# How long a persistent kernel waits for the host before it leaves the device. Short, because other
# work on the device (torch's kernels) cannot start while it spins; ranks leave and come together.
IDLE_S = 2.0
IDLE_RANKS_S = 600.0
MOST_ITERATIONS = (1 << 32) - 1


def counts_on(plan: Plan) -> bool:
    """Can launches of the plan's kernel go on from one another (`Executor.resume`)?"""
    variant = machine_of(plan).variant
    return len(plan.phases) == 1 and not variant.ring_bytes and not variant.role(COMMUNICATE)


class Executor(LoadedPlan):
    """One plan on one device. A context manager; `close` gives all memory back."""

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
        """externals: device addresses of external buffers by id. trace_records: per processor.
        budget_s: seconds that a wait on the device may take.

        Raises SystemError if memory or the compiler fails, before anything runs.
        """
        if not 0 < budget_s <= MOST_BUDGET_S:
            raise InvalidUsageError(
                f"the budget of a wait is {budget_s} s; it must be above 0 and at most "
                f"{MOST_BUDGET_S:g}"
            )
        super().__init__(plan, backend, device, ranks, externals, trace_records)
        self.budget_s = budget_s
        self.phase_ends: list[int] = []
        self.latest: Run | None = None
        self.resumed: int | None = None  # iterations so far of launches that go on
        self._params = np.zeros(1, layout.dtype("ArkParams"))

    def rebind(self, externals: Mapping[int, int]) -> None:
        """Moves external buffers to other addresses, by buffer id. What runs keeps the tables that
        it has; it is waited for where there is no room for another set of them.
        """
        moved = {n: a for n, a in externals.items() if a != self._externals[n]}
        if moved:
            if self._proxy is not None:
                for number, address in moved.items():
                    self._proxy.allow(address, self.plan.buffers[number].nbytes)
            self._tables.move(self._externals, moved, self.wait_idle)
        self._params["tasks"] = self._tables.arrays["tasks"].address

    @property
    def table(self) -> tuple[int, int]:
        """The address of the table of tasks that holds after `rebind`, and a number that changes
        when a table that held before is overwritten. See `use_table`.
        """
        return self._tables.arrays["tasks"].address, self._tables.replaced

    def use_table(self, address: int) -> None:
        """What `rebind` would do for the addresses for which it gave this `table`, if none was
        overwritten since. `rebind` counts from the addresses that itself was given.
        """
        self._params["tasks"] = address

    def wait_idle(self) -> None:
        """Waits for what runs, whose tables are about to change."""
        if self.latest is not None and self.latest.running():
            self.latest.wait()

    def start(self, iterations: int | Sequence[int], persistent: bool = False) -> Run:
        """Launches the loop kernel for so many iterations of each phase, in the plan's order.

        A number alone is the last phase's.

        persistent: runs until told to quit; iterations are released by `Run.release`. Raises
        InvalidUsageError while the launch before is running.
        """
        self._check_idle()
        each = self.phase_iterations(iterations)
        if persistent and len(self.kernels) > 1:
            raise InvalidUsageError(
                "the plan's phases are different kernels, which cannot run persistently; make it "
                "with the option variant='block'"
            )
        *self.phase_ends, _ = ends = list(itertools.accumulate(each))
        self._reset(ends)
        return self._launch(self._parameters(persistent), ends)

    def _check_idle(self) -> None:
        if self.latest is not None and self.latest.forked:
            raise InvalidUsageError(
                "the kernel was launched before this process was forked, and runs in the other one "
                "alone; launch here anew, or begin with a fresh process (multiprocessing's 'spawn')"
            )
        if self.latest is not None and self.latest.running():
            raise InvalidUsageError(
                "the launch before is still running; wait for its end or stop it (Run.stop)"
            )

    def resume(self, iterations: int = 1, stream: int | None = None) -> Run:
        """Launches so many iterations more: counters and epochs go on from where they stand.

        Ranks do not meet, so a launch costs no more than a kernel; the iteration barrier keeps an
        iteration from overtaking the one before on any rank. For plans of one phase without a
        stream of operands, in the variants `block` and `matrix`. stream: a queue of the device on
        which to run, behind what lies there; launches on one stream need not be waited for in
        between. Raises InvalidUsageError where the plan cannot or, without a stream, while the
        launch before is running.
        """
        if stream is None:
            self._check_idle()
        self.resumable()
        if self.latest is not None:
            self.latest.detach()  # what it would say is said by the launches behind it
        assert self.resumed is not None
        first, self.resumed = self.resumed, self.resumed + iterations
        self._params["first"], self._params["end"] = first, self.resumed
        return self._launch(self._params, [self.resumed], stream)

    def resumable(self) -> np.ndarray:
        """The parameters of launches that go on from one another; counted from here, if they are
        not yet.
        """
        if self.resumed is None:
            self._check_counts_on()
            self._reset([MOST_ITERATIONS])
            self.resumed = 0
            self._params = self._parameters(persistent=False)
        return self._params

    def watched(self, launch: Launch) -> Run:
        """A launch of this executor's, made by ark.runtime.streams or .inline, as its latest."""
        if self.latest is not None:
            self.latest.detach()
        assert self.resumed is not None
        return self._watch(launch, self.resumed)

    def _watch(self, launch: Launch, iterations: int) -> Run:
        trouble = self._proxy.error if self._proxy is not None else None
        self.latest = Run(
            launch, self._told, iterations, self.ranks, self.budget_s, self._explain, trouble
        )
        return self.latest

    def wake(self) -> None:
        """Tells the proxy, if there is one, that something will be asked of it soon."""
        if self._proxy is not None:
            self._proxy.wake()

    def _check_counts_on(self) -> None:
        if not counts_on(self.plan):
            raise InvalidUsageError(
                "a launch cannot go on from the one before: the plan has several phases, a ring or "
                f"roles (its kernel variant is {self.machine.variant.name!r}); start it anew "
                "(Executor.start)"
            )

    def record(self, iterations: int, stream: int) -> None:
        """Puts so many first iterations into the graph that is being captured on a stream; see
        ark.runtime.graphs. For plans that `resume` takes.
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
        """Raises GpuError if a wait of a graph's replay has given up."""
        if int(self._told["error"][0]) != 0:
            raise GpuError(self._explain(self._told[0]))

    def _reset(self, ends: Sequence[int]) -> None:
        """Sets everything back to before the first iteration, on all ranks together."""
        # Until its kernel has ended, a peer may still signal the launch before this one.
        self._drain()
        self._meet("the end of the launch before")
        self.resumed = None
        self._clear(ends)
        self._meet("the launch")

    def end(self) -> int:
        """How many iterations the last launch, which has ended, was to run: what it was started
        for, or fewer where a task ended the loop (ark.sample), or 0 where it was aborted.
        """
        return int(self._control_word("limit"))

    def _control_word(self, name: str) -> np.uint32:
        at = layout.dtype("ArkControl").fields
        assert at is not None
        word = self.device.read(self._control.address + int(at[name][1]), 4)
        return word.view(np.uint32)[0]

    def _drain(self) -> None:
        """Waits until the proxy has served what the launch before has asked for."""
        if self._proxy is not None and self.latest is not None:
            self._proxy.drain(int(self._control_word("fifo_head")), self.budget_s)

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
        params["together"] = self.plan.counters[ITERATION_BARRIER].step
        params["peers"] = int(self.plan.counters[ITERATION_BARRIER].system)
        params["persistent"] = int(persistent)
        params["budget_ns"] = int(self.budget_s * 1e9)
        idle_s = IDLE_S if self.plan.world_size == 1 else IDLE_RANKS_S
        params["idle_ns"] = int(idle_s * 1e9)
        return params

    def _launch(self, params: np.ndarray, ends: Sequence[int], stream: int | None = None) -> Run:
        """Launches the kernels that have something to do. ends: of the phases, in iterations."""
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

    def close(self, together: bool = True) -> bool:
        """Stops what runs and frees everything; safe to call twice.

        together: the ranks let go of each other's memory first and meet before any frees its own,
        as no peer may write there or have it mapped then. False after an error, when peers may
        never come and a lost device refuses to free: the error is what counts, and what peers may
        still write to is left to the process's end. Nothing is freed under a kernel: False is
        returned, after a warning, if it does not leave.
        """
        if self.latest is not None and not self.latest.stop():
            live.keep("a kernel did not leave its device after it was told to", self)
            return False
        together = together and not (self.latest is not None and self.latest.forked)
        if self._peers.far and together:  # peers' last signals pass through this rank's proxy
            self._drain()
            self._meet("the end of the launch before")
        if self.latest is not None:
            self.latest.detach()
        self.latest = None
        self._release(together)
        return True

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(together=kind is None)
