"""A kernel that works on torch's tensors in place: inputs and results are read and written where
torch has them (as DLPack would hand them over, without a copy).

Tables are made once. Where a tensor lies elsewhere than in the call before, the addresses in them
are moved; launches go on from one another, so that a call costs little more than a kernel.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

import ark
from ark.api.session import backend, device
from ark.errors import InvalidUsageError
from ark.frontend.foreign import check_memory, dense, is_literal
from ark.interop.torch.calls import Fixed, kinds, maker
from ark.interop.torch.graph import build, held
from ark.interop.torch.look import Look, looker, nothing
from ark.interop.torch.planning import planned
from ark.interop.torch.strides import Memory, Results, contiguous
from ark.interop.torch.values import Value
from ark.plan.serialize import machine_of
from ark.runtime.executor import Executor
from ark.runtime.graphs import record
from ark.runtime.inline import InlineRuns, inline_runs
from ark.runtime.run import Ranks
from ark.runtime.runner import Runner, load
from ark.runtime.streams import Streamed
from ark.variant import LOAD

HOST = 1  # DLPack's number for the host's memory
DENSE = torch.contiguous_format
BOX_BYTES = 16  # of which a matrix's address is a multiple where boxes of it are loaded
PROGRAMS: WeakSet[Program] = WeakSet()  # all that live, for who measures them


class Program:
    """A graph as a kernel on torch's tensors of fixed shapes. It is planned when it is made and
    compiled at the first call.

    inputs: values on the caller's memory. outputs: values, or what is known beforehand. held:
    tensors for the last inputs, the same ones in every call. fixed: places of inputs that are the
    same tensors in nearly every call (parameters); that they still are costs little to see.
    members: the job's ranks, for a model of several, which make and call theirs together. guarded:
    the caller sees in every call that shapes, types and devices are those of the first one, as
    Dynamo's guards do. made: torch's operators make the inputs, whose types its own shape
    propagation may have wrong (statistics of norms of 16 bits on a CPU); these are converted.
    results: how the outputs lie, and what a call gives of them; default contiguous, all of them.
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
        made: bool = False,
        results: Results | None = None,
    ) -> None:
        self._members = members
        self._guarded, self._made = guarded, made
        self._held = list(held)
        self._given = len(inputs) - len(held)
        self._fixed = Fixed(fixed)
        self._moving = [i for i in range(self._given) if i not in set(fixed)]
        self._inputs, self._outputs = list(inputs), list(outputs)
        self._device = device()
        self._turn = threading.Lock()  # a kernel has one launch at a time; threads take turns
        places = [v for v in (*self._inputs, *self._outputs) if isinstance(v, Value)]
        self._buffers = [v.tensor.ir.buffer for v in places]
        whole = all(t.data_ptr() % BOX_BYTES == 0 for t in self._held)
        self._plan = planned(model, places, self._device.machine, members, boxes=whole)
        loads = machine_of(self._plan).variant.role(LOAD)
        self._step = BOX_BYTES if loads else 1  # addresses of inputs are its multiples
        by_name = {b.name: b.id for b in self._plan.buffers if b.arena == "external"}
        self._ids = [by_name.get(b.name) for b in self._buffers]
        self._addresses: tuple[int, ...] = ()  # in the last call, of what moves
        self._loose: list[int | None] = []  # the plan's buffers of what moves
        self._tables: dict[tuple[int, ...], int] = {}  # of such addresses before
        self._replaced = 0
        self._captured: list[Executor] = []
        self._executor: Runner | None = None
        self._streamed: Streamed | None = None
        self._inline: InlineRuns | None = None
        self._kinds: list[tuple[Any, ...]] | None = None  # of what moved in the call before
        self._look: Look = nothing
        self._converted: dict[int, torch.dtype] = {}  # inputs by place, to the type that is read
        self._where = torch_device()
        self._results = None if results is None or results.plain else results
        memory = [None] * len(self._outputs) if results is None else results.memory
        self._makers = [
            maker(m or contiguous(v.shape), v.dtype, self._where)
            if isinstance(v, Value)
            else partial(_same, v)
            for v, m in zip(self._outputs, memory, strict=True)
        ]
        self._new = [i for i, v in enumerate(self._outputs) if isinstance(v, Value)]
        PROGRAMS.add(self)

    @classmethod
    def of(
        cls,
        module: fx.GraphModule,
        examples: Sequence[Any],
        fixed: Sequence[int] = (),
        bound: Mapping[int, torch.Tensor] | None = None,
        guarded: bool = False,
        made: bool = False,
        visible: int | None = None,
    ) -> Program:
        """A torch graph of ark's operators. examples: tensors like its inputs, or fake ones. bound:
        inputs by place that are held for ever; calls have the others. visible: how many results a
        caller sees; default all.
        """
        bound = bound or {}
        results = Results(module, visible)
        built = build(module, examples, ends=results.ends)
        with ark.use_model(built.model):
            taken: set[int] = set()
            outputs = [
                own(_in_order(v, m), taken) if isinstance(v, Value) else v
                for v, m in zip(built.outputs, results.memory, strict=True)
            ]
        with unset_fake_temporarily():  # constants of the graph are real, whoever traces it
            kept = [dense(t.detach()).to(torch_device()) for _, t in held(module)]
        last = [built.inputs[i] for i in bound]
        inputs = [v for i, v in enumerate(built.inputs[: len(examples)]) if i not in bound]
        inputs += [*last, *built.inputs[len(examples) :]]
        held_now = [*bound.values(), *kept]
        return cls(built.model, inputs, outputs, held_now, fixed, None, guarded, made, results)

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Others in the place of the first ones that are held."""
        with self._turn:
            self._held[: len(tensors)] = tensors
            self._kinds, self._look = None, nothing

    def __call__(self, *given: Any, iterations: int = 1) -> list[Any]:
        """The graph's results as new tensors, behind one launch of so many iterations."""
        return self.run(list(given), iterations)

    def run(self, inputs: list[Any], iterations: int = 1) -> list[Any]:
        """The same for a list, as AOTAutograd calls. Threads wait for each other."""
        with self._turn:
            return self._run(inputs, iterations)

    def _run(self, inputs: list[Any], iterations: int) -> list[Any]:
        found = self._look(inputs)
        if found is None or (self._step > 1 and any(a % self._step for a in found)):
            moving = self._seen(inputs)  # held until the launch: there may be copies among them
            found = tuple([t.data_ptr() for t in moving])
        made = [make() for make in self._makers]
        addresses = (*found, *[made[i].data_ptr() for i in self._new])
        if self._device.dlpack[0] == HOST:
            self._here(self._placed(addresses), iterations)
        else:
            self._on_stream(addresses, iterations)
        return made if self._results is None else self._results.of(made)

    def _here(self, executor: Runner, iterations: int) -> None:
        """A launch that is waited for; on this very thread if the launch before was short, because
        Ctrl-C waits for its end then.
        """
        inline = self._inline
        if inline is not None and iterations == 1 and inline.short():
            inline()
        else:
            executor.resume(iterations).wait()

    def _seen(self, inputs: list[Any]) -> list[torch.Tensor]:
        """Those that move, or copies that the kernel can read, where something is not as in the
        call before.
        """
        if len(inputs) != self._given:
            raise InvalidUsageError(f"{len(inputs)} tensors were given; expected {self._given}")
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
        """Can the kernel read it where it lies?"""
        aligned = tensor.is_contiguous() and tensor.data_ptr() % self._step == 0
        return aligned and is_literal(tensor)

    def _same_kinds(self, moving: Sequence[Any]) -> bool:
        """Have these tensors the shapes, types and devices of those in the call before?"""
        try:
            return kinds(moving) == self._kinds
        except AttributeError as error:
            names = ", ".join(type(t).__name__ for t in moving)
            raise InvalidUsageError(f"tensors are expected, got {names}") from error

    def _check(self, inputs: Sequence[torch.Tensor]) -> None:
        """The tensors' device is ark's, and shapes and types are those of the plan. Learns where
        the fixed ones lie.
        """
        self._converted = {}
        for i, (tensor, value) in enumerate(zip((*inputs, *self._held), self._inputs, strict=True)):
            if not isinstance(tensor, torch.Tensor):
                raise InvalidUsageError(f"a tensor is expected, got {type(tensor).__name__}")
            number = tensor.dim() == 0 and tensor.device.type == "cpu" and i < self._given
            if number and tensor.device != self._where:  # torch takes it beside any device's
                self._converted[i] = value.dtype
            elif tensor.device != self._where:
                raise InvalidUsageError(
                    f"a tensor lies on {tensor.device}, but ark runs on {backend().name}; move the "
                    "module and its inputs there, or call ark.init(backend=...)"
                )
            check_memory(tensor)
            if self._made and i < self._given and tensor.dtype != value.dtype:
                self._converted[i] = value.dtype
            elif tensor.dtype != value.dtype or tuple(tensor.shape) != value.shape:
                raise InvalidUsageError(
                    f"a tensor is {tensor.dtype} {list(tensor.shape)}; the kernel is made for "
                    f"{value.dtype} {list(value.shape)}"
                )
        copied = [i for i in self._fixed.which if i in self._converted or not self._fits(inputs[i])]
        if copied:  # in every call
            self._fixed = Fixed([i for i in self._fixed.which if i not in copied])
            self._moving = sorted({*self._moving, *copied})
        self._fixed.learn(inputs)
        self._addresses = ()

    def _places(self, addresses: Sequence[int]) -> dict[int, int]:
        """By external buffer of the plan: where it lies in this call. addresses: of the inputs that
        move and of the results.
        """
        count = len(self._moving)
        lie = dict(zip(self._moving, addresses[:count], strict=True))
        lie.update(self._fixed.addresses)
        held = [t.data_ptr() for t in self._held]
        each = [*[lie[i] for i in range(self._given)], *held, *addresses[count:]]
        return {i: a for i, a in zip(self._ids, each, strict=True) if i is not None}

    def _placed(self, addresses: tuple[int, ...]) -> Runner:
        """The kernel, which knows where the tensors of this call lie."""
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
        """Addresses of a call before have a table already."""
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
        """Behind what the caller has queued, as DLPack's stream rule asks; or into the graph that
        the caller is capturing, which has a kernel with tables of its own.
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
        """What an iteration of the kernel takes, of many in one launch, on the last call's tensors,
        which must still be there.
        """
        assert self._executor is not None
        if isinstance(self._executor, Executor):
            self._executor.wait_idle()
        run = self._executor.resume(iterations)
        run.wait()
        return run.elapsed_ms() / 1e3 / iterations

    def retire(self) -> None:
        """Gives the kernel's memory back when its last launch has ended; a call loads it again.
        Nothing for a kernel in captured graphs, which may be replayed.
        """
        with self._turn:
            if self._captured or self._executor is None:
                return
            if isinstance(self._executor, Executor):
                self._executor.wait_idle()
            self._close()

    def close(self) -> None:
        """Gives the kernel's memory back; graphs that were captured must not be replayed then."""
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
    """ark's device as torch names it."""
    kind, index = device().dlpack
    return torch.device("cpu") if kind == HOST else torch.device("cuda", index)


def _same(value: Any) -> Any:
    """What is known beforehand."""
    return value


def _in_order(value: Value, memory: Memory | None) -> Value:
    """The value with its dimensions in the order in which they lie in memory."""
    order = None if memory is None else memory.order
    if order is None or order == tuple(range(len(order))):
        return value
    return dataclasses.replace(value, tensor=ark.transpose(value.tensor, list(order)))


def own(value: Value, taken: set[int]) -> Value:
    """A result on memory of its own: a copy where it is an input, a view, or there twice. taken:
    buffers of the results before.
    """
    tensor = value.tensor.ir
    alone = tensor.buffer.arena == "activation" and tensor.nbytes == tensor.buffer.nbytes
    if not alone or tensor.buffer.id in taken:
        value = dataclasses.replace(value, tensor=ark.copy(value.tensor))
    taken.add(value.tensor.ir.buffer.id)
    return value
