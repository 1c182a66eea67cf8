"""Runs a kernel on torch's tensors in place: inputs and results are read and written in torch's
memory, as DLPack would pass them, without a copy.

The kernel's tables are built once. If a tensor is at another address than in the previous call, its
addresses in the tables are updated. Launches continue from one another, so a call costs little more
than a kernel launch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

import ark
from ark.backend.devices import KernelDevice
from ark.errors import InvalidUsageError
from ark.frontend.foreign import check_memory, dense, is_literal
from ark.interop.torch import last_calls
from ark.interop.torch.calls import Fixed, kinds, makers
from ark.interop.torch.graph import build, held
from ark.interop.torch.look import Look, looker, nothing
from ark.interop.torch.planning import Planning
from ark.interop.torch.strides import Results
from ark.interop.torch.values import Value, in_order, own
from ark.machine.variant import LOAD
from ark.plan.serialize import machine_of
from ark.plan.types import BOX_ALIGNMENT_BYTES, Plan
from ark.runtime.executor import Executor
from ark.runtime.graphs import record
from ark.runtime.inline import InlineRuns, inline_runs
from ark.runtime.program import begin
from ark.runtime.run import Ranks
from ark.runtime.runner import Runner, load
from ark.runtime.session import backend, device
from ark.runtime.streams import Streamed

DLPACK_HOST = 1  # DLPack's number for the host's memory
DENSE = torch.contiguous_format
PROGRAMS: WeakSet[Program] = WeakSet()  # all live programs, for measurements
LEFT: list[str] = []  # operators that stayed in torch, with reasons, for measurements


class Program:
    """A graph that runs as one kernel on torch's tensors, for fixed shapes. It is planned when it
    is created, and compiled at the first call.

    inputs, outputs: the graph's inputs and results, in memory of the caller; a result may be a
    constant. held: tensors that the program keeps; they are the last inputs in every call. fixed:
    indices of inputs that are the same tensors in nearly every call (parameters); a call only
    checks that they are. members: the job's ranks, which create and call their programs together.
    guarded: True if the caller ensures that shapes, types and devices are those of the first call,
    as Dynamo's guards do. by_torch: True if inputs are results of torch's operators; an input is
    converted if torch's shape propagation states another type. results: which outputs a call
    returns, and their strides; by default all outputs, contiguous. compare: see Planning. later:
    True if the caller ends planning by `finish`, so that other kernels can begin to compile first.
    loose: True if held tensors may be replaced by unaligned ones.
    """

    def __init__(
        self,
        model: ark.Model,
        inputs: Sequence[Value],
        outputs: Sequence[Any],
        held: Sequence[torch.Tensor] = (),
        fixed: Sequence[int] = (),
        members: Ranks | None = None,
        guarded: bool = False,
        by_torch: bool = False,
        results: Results | None = None,
        compare: bool = False,
        later: bool = False,
        loose: bool = True,
    ) -> None:
        self._members = members
        self._guarded, self._by_torch = guarded, by_torch
        self._held = list(held)
        self._given = len(inputs) - len(held)
        self._fixed = Fixed(fixed)
        self._moving = [i for i in range(self._given) if i not in set(fixed)]
        self._inputs, self._outputs = list(inputs), list(outputs)
        self._device = device()
        self._turn = threading.Lock()  # a kernel has one launch at a time
        places = [v for v in (*self._inputs, *self._outputs) if isinstance(v, Value)]
        self._buffers = [v.tensor.ir.buffer for v in places]
        whole = all(t.data_ptr() % BOX_ALIGNMENT_BYTES == 0 for t in self._held)
        kept = [*self._inputs[self._given :], *(self._inputs[i] for i in fixed)]
        fresh = {b.name for b in self._buffers} - {v.tensor.ir.buffer.name for v in self._inputs}
        machine = self._device.machine
        given = (machine, members, whole, compare, kept, fresh, loose)
        self._planning = Planning(model, places, *given)
        self._begun = self._begin(self._planning.drafted())
        self._addresses: tuple[int, ...] = ()  # addresses of moving tensors in the last call
        self._loose: list[int | None] = []  # plan buffers of moving tensors
        self._tables: dict[tuple[int, ...], int] = {}  # by earlier addresses of moving tensors
        self._replaced = 0
        self._captured: list[Executor] = []
        self._executor: Runner | None = None
        self._streamed: Streamed | None = None
        self._inline: InlineRuns | None = None
        self._kinds: list[tuple[Any, ...]] | None = None  # kinds of the last call's moving tensors
        self._look: Look = nothing
        self._converted: dict[int, torch.dtype] = {}  # by input: the type to which it is cast
        self._where = torch_device()
        self._results = None if results is None or results.plain else results
        memory = None if results is None else results.memory
        self._makers = makers(self._outputs, memory, self._where)
        self._new = [i for i, v in enumerate(self._outputs) if isinstance(v, Value)]
        PROGRAMS.add(self)
        if not later:
            self._finish()

    @classmethod
    def of(
        cls,
        module: fx.GraphModule,
        examples: Sequence[Any],
        fixed: Sequence[int] = (),
        bound: Mapping[int, torch.Tensor] | None = None,
        guarded: bool = False,
        by_torch: bool = False,
        visible: int | None = None,
        compare: bool = False,
        later: bool = False,
    ) -> Program:
        """Creates a program from a torch graph of operators that ark supports. examples: tensors or
        fake tensors, one per input. bound: tensors that are held for certain inputs, by the input's
        index; calls pass the other inputs. visible: how many results a caller sees; by default all.
        """
        bound = bound or {}
        results = Results(module, visible)
        built = build(module, examples, ends=results.ends)
        with ark.use_model(built.model):
            taken: set[int] = set()
            orders = [None if m is None else m.order for m in results.memory]
            outputs = [
                own(in_order(v, order), taken) if isinstance(v, Value) else v
                for v, order in zip(built.outputs, orders, strict=True)
            ]
        with unset_fake_temporarily():  # the graph's constants are real tensors, also in tracing
            kept = [dense(t.detach()).to(torch_device()) for _, t in held(module)]
        last = [built.inputs[i] for i in bound]
        inputs = [v for i, v in enumerate(built.inputs[: len(examples)]) if i not in bound]
        inputs += [*last, *built.inputs[len(examples) :]]
        held_now = [*bound.values(), *kept]
        more = (fixed, None, guarded, by_torch, results, compare, later, bool(bound))
        return cls(built.model, inputs, outputs, held_now, *more)

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces the first held tensors, which are inputs in every call, by these."""
        with self._turn:
            self._held[: len(tensors)] = tensors
            self._kinds, self._look = None, nothing

    def _begin(self, plan: Plan | None) -> bool:
        """Starts to compile a plan's kernel in another thread. The first call waits for the end."""
        if plan is not None and isinstance(self._device, KernelDevice):
            begin(plan, backend(), self._device.arch)
        return plan is not None

    def finish(self) -> None:
        """Ends planning, if the constructor has not (`later`). The kernel then begins to compile,
        unless it could begin before.
        """
        self._finish()
        if not self._begun:
            self._begin(self._plan)

    def _finish(self) -> None:
        self._plan = self._planning.finish()
        del self._planning
        loads = machine_of(self._plan).variant.role(LOAD)
        self._step = BOX_ALIGNMENT_BYTES if loads else 1  # inputs' addresses are its multiples
        by_name = {b.name: b.id for b in self._plan.buffers if b.arena == "external"}
        self._ids = [by_name.get(b.name) for b in self._buffers]

    def __call__(self, *given: Any, iterations: int = 1) -> list[Any]:
        """Launches the kernel; returns the graph's results as new tensors."""
        return self.run(list(given), iterations)

    def run(self, inputs: list[Any], iterations: int = 1) -> list[Any]:
        """Runs the graph as `__call__` does, but takes the inputs as one list, as AOTAutograd
        passes them. If several threads call this method, they run one after another.
        """
        with self._turn:
            return self._run(inputs, iterations)

    def _run(self, inputs: list[Any], iterations: int) -> list[Any]:
        moving, where = inputs, self._look(inputs)
        if where is None or (self._step > 1 and any(a % self._step for a in where)):
            moving = self._seen(inputs)  # keeps possible copies alive until the launch
            where = tuple([t.data_ptr() for t in moving])
        outputs = [make() for make in self._makers]
        addresses = (*where, *[outputs[i].data_ptr() for i in self._new])
        if self._device.dlpack[0] == DLPACK_HOST:
            self._here(self._placed(addresses), iterations)
        else:
            self._on_stream(addresses, iterations)
        if last_calls.calls is not None:
            last_calls.calls[self] = moving, outputs
        return outputs if self._results is None else self._results.of(outputs)

    def _here(self, executor: Runner, iterations: int) -> None:
        """Launches the kernel and waits until it has ended. If the previous launch was short, the
        kernel runs on the calling thread. (Ctrl-C then has to wait until the launch ends.)
        """
        inline = self._inline
        if inline is not None and iterations == 1 and inline.short():
            inline()
        else:
            executor.resume(iterations).wait()

    def _seen(self, inputs: list[Any]) -> list[torch.Tensor]:
        """Returns the moving tensors, which are the inputs that may have another address in each
        call, or copies of them that the kernel can read. Called if anything differs from the
        previous call.
        """
        if len(inputs) != self._given:
            raise InvalidUsageError(f"expected {self._given} tensors, got {len(inputs)}")
        moving = [inputs[i] for i in self._moving]
        same = self._kinds is not None and (self._guarded or self._same_kinds(moving))
        if not same or not self._fixed.lie(inputs):
            self._check(inputs)
            moving = [inputs[i] for i in self._moving]
            self._kinds = kinds(moving)
            self._look = nothing if self._converted else looker(inputs, self._moving)
        if self._converted:
            moving = [
                t.to(self._where, self._converted.get(i, t.dtype))
                for i, t in zip(self._moving, moving, strict=True)
            ]
        for tensor in moving:
            check_memory(tensor)
        return [t if self._fits(t) else t.clone(memory_format=DENSE) for t in moving]

    def _fits(self, tensor: torch.Tensor) -> bool:
        """True if the kernel can read the tensor in place."""
        aligned = tensor.is_contiguous() and tensor.data_ptr() % self._step == 0
        return aligned and is_literal(tensor)

    def _same_kinds(self, moving: Sequence[Any]) -> bool:
        """True if these tensors have the shapes, types and devices of the previous call's
        tensors.
        """
        try:
            return kinds(moving) == self._kinds
        except AttributeError as error:
            names = ", ".join(type(t).__name__ for t in moving)
            raise InvalidUsageError(f"expected tensors, got {names}") from error

    def _check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Checks that the tensors are on ark's device and have the plan's shapes and types. Records
        the addresses of fixed tensors.
        """
        self._converted = {}
        for i, (tensor, value) in enumerate(zip((*inputs, *self._held), self._inputs, strict=True)):
            if not isinstance(tensor, torch.Tensor):
                raise InvalidUsageError(f"expected a tensor, got {type(tensor).__name__}")
            number = tensor.dim() == 0 and tensor.device.type == "cpu" and i < self._given
            if number and tensor.device != self._where:  # torch accepts such a tensor on any device
                self._converted[i] = value.dtype
            elif tensor.device != self._where:
                raise InvalidUsageError(
                    f"a tensor is on {tensor.device}, but ark runs on {backend().name}; move "
                    "the module and its inputs there, or call ark.init(backend=...)"
                )
            check_memory(tensor)
            if self._by_torch and i < self._given and tensor.dtype != value.dtype:
                self._converted[i] = value.dtype
            elif tensor.dtype != value.dtype or tuple(tensor.shape) != value.shape:
                raise InvalidUsageError(
                    f"a tensor is {tensor.dtype} {list(tensor.shape)}; the kernel was compiled "
                    f"for {value.dtype} {list(value.shape)}"
                )
        copied = [i for i in self._fixed.which if i in self._converted or not self._fits(inputs[i])]
        if copied:  # these are copied in every call, like moving tensors
            self._fixed = Fixed([i for i in self._fixed.which if i not in copied])
            self._moving = sorted({*self._moving, *copied})
        self._fixed.learn(inputs)
        self._addresses = ()

    def _places(self, addresses: Sequence[int]) -> dict[int, int]:
        """The address of each external buffer of the plan in this call. addresses: those of the
        moving inputs and the results.
        """
        count = len(self._moving)
        lie = dict(zip(self._moving, addresses[:count], strict=True))
        lie.update(self._fixed.addresses)
        held = [t.data_ptr() for t in self._held]
        each = [*[lie[i] for i in range(self._given)], *held, *addresses[count:]]
        return {i: a for i, a in zip(self._ids, each, strict=True) if i is not None}

    def _placed(self, addresses: tuple[int, ...]) -> Runner:
        """The loaded kernel, with the addresses of this call's tensors in its tables."""
        if self._executor is None:
            places = self._places(addresses)
            self._executor = load(
                self._plan, backend(), self._device, externals=places, ranks=self._members
            )
            self._inline = inline_runs(self._executor)
        elif not self._addresses:
            self._executor.rebind(self._places(addresses))
            self._tables.clear()
        elif addresses != self._addresses:
            self._moved(addresses)
        else:
            return self._executor
        self._addresses = addresses
        if len(self._loose) != len(addresses):
            self._loose = [*[self._ids[i] for i in self._moving], *self._ids[len(self._inputs) :]]
        return self._executor

    def _moved(self, addresses: tuple[int, ...]) -> None:
        """Makes the kernel use the task table for these addresses. The table is cached for later
        calls with the same addresses.
        """
        executor = self._executor
        each = zip(self._loose, addresses, strict=True)
        if not isinstance(executor, Executor):
            assert executor is not None
            executor.rebind({i: a for i, a in each if i is not None})
            return
        known = self._tables.get(addresses)
        if known is not None:
            executor.use_table(known)
            return
        executor.rebind({i: a for i, a in each if i is not None})
        table, replaced = executor.table
        if replaced != self._replaced:
            self._tables.clear()
            self._replaced = replaced
        self._tables[addresses] = table

    def _on_stream(self, addresses: tuple[int, ...], iterations: int) -> None:
        """Launches the kernel on the caller's stream, after the work that the caller has queued
        there, as DLPack requires. If the caller is capturing a graph, the launch is added to the
        graph, with a kernel that has tables of its own.
        """
        stream = torch._C._cuda_getCurrentRawStream(self._where.index)
        if torch._C._cuda_isCurrentStreamCapturing():
            places = self._places(addresses)
            self._captured.append(
                record(self._plan, backend(), self._device, places, iterations, stream)
            )
            return
        for captured in self._captured:
            captured.check()
        executor = self._placed(addresses)
        if self._streamed is None:
            assert isinstance(executor, Executor)
            self._streamed = Streamed(executor)
        self._streamed(stream, iterations)

    def iteration_seconds(self, iterations: int = 200) -> float:
        """Measures the seconds per iteration, with many iterations in one launch, on the tensors of
        the last call. Raises InvalidUsageError unless `kept_tensors` keeps them.
        """
        assert self._executor is not None
        return last_calls.iteration_seconds(self, self._executor, iterations)

    def memory_bytes(self) -> int:
        """The bytes of the kernel's own memory, without inputs and results."""
        return sum(n for arena, n in self._plan.arenas.items() if arena != "external")

    def retire(self) -> None:
        """Frees the kernel's memory after its last launch has ended. A later call loads it again.
        Does nothing if the kernel is in captured graphs, which may be replayed.
        """
        with self._turn:
            if self._captured or self._executor is None:
                return
            if isinstance(self._executor, Executor):
                self._executor.wait_idle()
            self._close()

    def close(self) -> None:
        """Frees the kernel's memory. Captured graphs must not be replayed afterwards."""
        with self._turn:
            for executor in self._captured:
                executor.close()
            self._captured.clear()
            self._close()

    def _close(self) -> None:
        if self._executor is not None:
            self._executor.close()
            self._executor = self._streamed = self._inline = None
        self._addresses, self._loose, self._replaced = (), [], 0
        self._tables.clear()


def torch_device() -> torch.device:
    """The device that ark uses, in torch's notation."""
    kind, index = device().dlpack
    return torch.device("cpu") if kind == DLPACK_HOST else torch.device("cuda", index)
