"""ARK's Runtime: launches the current model's loop kernel and runs iterations of it.

With loop_mode=True, one persistent kernel runs, and waits between runs for the host (through
host-mapped memory). With loop_mode=False, a kernel is started for each run. Called by users.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Mapping
from enum import Enum
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakMethod, WeakSet, ref

from ark.backend.devices import Device, FedDevice, Memory
from ark.errors import BaseError, GpuError, InvalidUsageError
from ark.frontend.model import Model
from ark.frontend.storage import Storage
from ark.frontend.streams import StreamLike, synchronize, wait_for_stream
from ark.frontend.tensor import Tensor, provided
from ark.runtime import live, planner
from ark.runtime.bound import bind, check_overlaps
from ark.runtime.planned import Planned
from ark.runtime.run import Ranks, Run
from ark.runtime.runner import Runner, load
from ark.runtime.session import backend, device, ranks
from ark.runtime.turns import in_turn

if TYPE_CHECKING:
    import torch

ITERATION_END = 1 << 31  # iterations of a persistent launch, more than any run
TRACE_RECORDS = 1 << 16


class Runtime:
    """Launches a plan and runs its iterations; one launch at a time.

    A context manager that stops the launch at its end. Calls from several threads are executed one
    after the other. Reads and writes of tensors in other threads are not synchronised.

    ranks: the job's ranks, if there are several; by default those that ark.init joins.

    Examples:
        >>> y = ark.ones([4])
        >>> with ark.Runtime() as runtime:
        ...     runtime.launch()
        ...     runtime.run()
    """

    class State(Enum):
        """The state of a runtime: no launch, a launch without work, or running iterations."""

        Init = 0
        LaunchedNotRunning = 1
        Running = 2

    _all: ClassVar[WeakSet[Runtime]] = WeakSet()
    _latest: ClassVar[ref[Runtime] | None] = None
    _shared: ClassVar[Runtime | None] = None  # the last result of get_runtime
    last_plan: Planned | None = None

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._turn = threading.RLock()
        self.loop_mode = True
        self.executor: Runner | None = None
        self._ranks = ranks
        self._plan: Planned | None = None
        self._run: Run | None = None
        self._target = 0
        self._elapsed = 0.0
        self._held: list[Storage] = []
        self._extra: list[Memory] = []
        self._device: Device | None = None
        Runtime._all.add(self)
        Runtime._latest = ref(self)

    @staticmethod
    def get_runtime() -> Runtime:
        """The most recent runtime that still exists; otherwise a new one."""
        Runtime._shared = (Runtime._latest and Runtime._latest()) or Runtime()
        return Runtime._shared

    @property
    def state(self) -> Runtime.State:
        """The state; Running until the iterations of `run(non_blocking=True)` have ended."""
        if not self.launched():
            return Runtime.State.Init
        return Runtime.State.LaunchedNotRunning if self._idle() else Runtime.State.Running

    @staticmethod
    def stop_all() -> None:
        """Stops every runtime of the process. Iterations that have not run are dropped."""
        for runtime in list(Runtime._all):
            with contextlib.suppress(BaseError):
                runtime._abandon(collective=runtime._idle())

    def launched(self) -> bool:
        """True if a plan is launched, so that `run` may be called."""
        return self._plan is not None

    def running(self) -> bool:
        """True while a kernel is on the device."""
        return self._run is not None and self._run.running()

    @in_turn
    def launch(
        self,
        plan: Planned | None = None,
        device_id: int = -1,
        stream: StreamLike = 0,
        loop_mode: bool = True,
        record: bool = False,
        tensor_mappings: Mapping[Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Plans (unless a plan is given), compiles, allocates and, in loop mode, starts the kernel.

        plan: an ark.Plan. device_id: -1 for the model's device. stream: an object with
        synchronize(), which is called first; 0 for none. record: True to record a trace of tasks.
        tensor_mappings: placeholders and their torch tensors. A previous launch is stopped first.
        """
        if plan is not None and not isinstance(plan, Planned):
            raise InvalidUsageError(
                f"the plan is {plan!r:.60}; give an ark.Plan (of Planner.plan, Plan.from_file or "
                "Plan(dict)), or None to plan the current model"
            )
        wait_for_stream(stream)
        self.stop()
        planner.capture(plan)
        if any(r.running() for r in Runtime._all):
            raise InvalidUsageError(
                "another Runtime's kernel is on the device, and all of a kernel's processors must "
                "be resident; stop that one first (Runtime.stop, or leave its with block)"
            )
        bind(tensor_mappings)
        self._device = device(device_id)
        world = Model.get_world_size()
        members = self._members(world) if plan is None and world > 1 else None
        given = planner.Planner(device_id, ranks=members).plan() if plan is None else plan
        chosen = given.built(self._device.machine, self._members)
        model = chosen.model or Model.get_model()
        self._held = list(model.storages.values())
        self.loop_mode = loop_mode
        self._place(self._device)
        self._elapsed = 0.0
        try:
            if chosen.inner is not None:
                self._load(chosen, model, record)
        except BaseException:
            self.stop()
            raise
        self._plan = Runtime.last_plan = chosen

    def _place(self, device: Device) -> None:
        """Allocates memory for tensors that Python objects hold, except those that the plan has.

        On some devices a running kernel sees writes of the host only in uncached memory. So in loop
        mode inputs are allocated in uncached memory. Weights are not, because reading them would be
        slower. A tensor that has memory keeps it; before it is written, `_settle` ends the loop.
        """
        for storage in self._held:
            storage.busy = WeakMethod(self.wait)
            if storage.symmetric or (storage.foreign and not storage.address):
                continue
            if storage.foreign or not self.loop_mode or not isinstance(device, FedDevice):
                storage.place(device)
                continue
            storage.place(device, "device" if storage.weight else device.fed)
            if not storage.lies_in(device.fed):
                storage.settle = WeakMethod(self._settle)

    @in_turn
    def _settle(self) -> None:
        """Called before a write to a tensor whose old values a running kernel may have cached.

        Ends the loop; the next run starts it again. Raises InvalidUsageError if there are several
        ranks, because all of them would have to end their loops.
        """
        if self._run is None or self._target == 0 or not self._run.running():
            return  # no iteration was requested, so the kernel has read nothing
        if self._plan is not None and self._plan.world_size > 1:
            raise InvalidUsageError(
                "on this device a running kernel may not see new weights, and the loops of "
                f"{self._plan.world_size} ranks can only end at the same time; call stop() and "
                "launch() on all ranks, or launch with loop_mode=False"
            )
        self._end_loop()

    def _load(self, plan: Planned, model: Model, record: bool) -> None:
        assert plan.inner is not None and self._device is not None
        members = self._members(plan.world_size) if plan.world_size > 1 else None
        self.executor = load(
            plan.inner,
            backend(),
            self._device,
            ranks=members,
            externals=self._addresses(plan, model),
            trace_records=TRACE_RECORDS if record else 0,
        )
        if self.loop_mode:
            self._start()

    def _members(self, world_size: int) -> Ranks:
        """The connection to the other ranks. Raises InvalidUsageError for a single rank."""
        members = self._ranks or ranks()
        if members is None:
            raise InvalidUsageError(
                f"the plan is for {world_size} ranks, but this process is alone; start it with "
                "ark.launch or torchrun"
            )
        return members

    def _addresses(self, plan: Planned, model: Model) -> dict[int, int]:
        """For each external buffer of the plan the address of its memory, by the buffer's id."""
        assert plan.inner is not None and self._device is not None
        by_buffer = {model.graph.buffers[i].name: s for i, s in model.storages.items()}
        addresses = {}
        for buffer in plan.inner.buffers:
            if buffer.arena != "external":
                continue
            if (storage := by_buffer.get(buffer.name)) is not None:
                addresses[buffer.id] = storage.place(self._device)
                continue
            self._extra.append(self._device.alloc(buffer.nbytes, "device"))
            addresses[buffer.id] = self._extra[-1].address
        check_overlaps(plan.inner, addresses)
        return addresses

    def _start(self) -> None:
        assert self.executor is not None
        synchronize()
        self._target = 0
        self._run = self.executor.start(ITERATION_END, persistent=True)

    @in_turn
    def run(
        self,
        iter: int = 1,
        non_blocking: bool = False,
        tensor_mappings: Mapping[Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Runs `iter` iterations; returns at once if non_blocking. Raises GpuError if they fail.

        Without loop_mode, the run ends after an iteration that samples a stop token (ark.sample).
        """
        if self._plan is None:
            raise InvalidUsageError("no plan is launched; call Runtime.launch() before run()")
        if tensor_mappings:
            self._rebind(tensor_mappings)
        if isinstance(iter, bool) or not isinstance(iter, Integral) or not 0 < iter < ITERATION_END:
            raise InvalidUsageError(
                f"{iter!r} is not a valid number of iterations; give a whole number from 1 to "
                f"{ITERATION_END - 1}"
            )
        if self.executor is None:
            return
        iter = int(iter)
        begin = time.perf_counter()
        if self.loop_mode:
            if self._target + iter >= ITERATION_END:
                self._end_loop()
            if self._run is None or not self._run.running():
                self._start()
            assert self._run is not None
            synchronize()
            self._target += iter
            self._run.release(self._target)
        else:
            self.wait()
            synchronize()
            self._run = self.executor.start(iter)
        if not non_blocking:
            self.wait()
            self._elapsed += time.perf_counter() - begin

    def _rebind(self, mappings: Mapping[Tensor, torch.Tensor]) -> None:
        if self.loop_mode:
            raise InvalidUsageError(
                "a running loop keeps its memory: launch with loop_mode=False to change "
                "tensor_mappings between runs, or copy the data into the tensor"
            )
        bind(mappings)
        if self.executor is not None and self._plan is not None:
            model = self._plan.model or Model.get_model()
            self.executor.rebind(self._addresses(self._plan, model))

    def barrier(self) -> None:
        """Waits for all ranks; returns at once if there is only one."""
        members = self._ranks or ranks()
        if self._plan is not None and self._plan.world_size > 1 and members is not None:
            members.barrier()

    @in_turn
    def wait(self) -> None:
        """Waits until the requested iterations have run. Raises GpuError if the kernel failed."""
        if self._run is None:
            return
        try:
            if self.loop_mode:
                while not self._run.wait_done(self._target):
                    if self._run.left_idle:
                        self._go_on()
                        continue
                    raise GpuError(
                        f"the kernel ended after {self._run.iterations_done} of {self._target} "
                        "iterations; launch again"
                    )
            else:
                self._run.wait()
                assert self.executor is not None
                if not 0 < self.executor.end() == self._run.iterations_done:
                    self._run.check_complete()
                self._run = None
        except BaseException:
            self._abandon()
            raise

    def _end_loop(self) -> None:
        """Ends the persistent kernel after the requested iterations have run."""
        self.wait()
        if self._run is not None:
            self._run.quit()
            self._run.wait()
            self._run = None

    def _idle(self) -> bool:
        """True if all requested iterations have run, so that ranks may free their memory."""
        if self._run is None:
            return True
        done = self._run.iterations_done
        return done >= self._target if self.loop_mode else not self._run.running()

    def _go_on(self) -> None:
        """Launches the kernel again after it has left the device because it was idle."""
        assert self._run is not None
        owed = self._target - self._run.iterations_done
        self._start()
        self._target = owed
        self._run.release(owed)

    @in_turn
    def stop(self) -> float:
        """Ends the launch and frees its memory; returns the milliseconds spent in `run`."""
        try:
            self._end_loop()
        except BaseException:
            self._abandon()
            raise
        self._abandon(collective=True)
        return self._elapsed * 1e3

    def reset(self) -> None:
        """Ends the launch, if there is one; the runtime may launch again."""
        if self.launched():
            self.stop()

    def _abandon(self, collective: bool = False) -> None:
        """Stops and frees after an error, in any device state. collective: see Executor.close."""
        self._run, self._target = None, 0
        executor, self.executor = self.executor, None
        if executor is not None and not executor.close(collective):
            live.keep("the tensors of that kernel are kept as well", self._held, self._extra)
            self._extra = []
        for memory in self._extra:
            if self._device is not None:
                self._device.free(memory)
        self._extra = []
        for storage in self._held:
            storage.settle = storage.busy = None
        self._held = []
        self._plan = None

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.stop()
        else:
            self._abandon()

    def __del__(self) -> None:
        self._abandon()


# A persistent kernel must not outlive the memory that it uses.
atexit.register(Runtime.stop_all)


def _run_once(model: Model) -> None:
    with Runtime() as runtime:
        runtime.launch(planner.Planner(-1, model).plan(), loop_mode=False)
        runtime.run()


provided["run"] = _run_once
