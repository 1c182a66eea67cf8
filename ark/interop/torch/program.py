"""A kernel that works on torch's tensors in place: inputs and results are read and written where
torch has them (as DLPack would hand them over, without a copy).

Tables are made once. Where a tensor lies elsewhere than in the call before, the addresses in them
are moved; launches go on from one another, so that a call costs little more than a kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

import ark
from ark.api.session import backend, device
from ark.errors import InvalidUsageError, UnsupportedError
from ark.interop.torch.graph import build, held
from ark.interop.torch.values import Value
from ark.lower.pipeline import plan as make_plan
from ark.plan.verify import verify
from ark.runtime.runner import Runner, load

HOST = 1  # DLPack's number for the host's memory


class Program:
    """A graph as a kernel on torch's tensors of fixed shapes. It is planned when it is made and
    compiled at the first call.

    inputs: values on the caller's memory. outputs: values, or what is known beforehand. held:
    tensors for the last inputs, the same ones in every call.
    """

    def __init__(
        self,
        model: ark.Model,
        inputs: Sequence[Value],
        outputs: Sequence[Any],
        held: Sequence[torch.Tensor] = (),
    ) -> None:
        self._held = held
        self._inputs, self._outputs = list(inputs), list(outputs)
        self._device = device()
        places = [v for v in (*self._inputs, *self._outputs) if isinstance(v, Value)]
        self._buffers = [v.tensor.ir.buffer for v in places]
        options = {"external": sorted({b.id for b in self._buffers})}
        self._plan = make_plan(model.graph, self._device.machine, options)
        verify([self._plan])
        by_name = {b.name: b.id for b in self._plan.buffers if b.arena == "external"}
        self._ids = [by_name.get(b.name) for b in self._buffers]
        self._addresses: list[int] = []
        self._executor: Runner | None = None
        self._kinds: list[tuple[Any, ...]] | None = None  # of the call before

    @classmethod
    def of(cls, module: fx.GraphModule, examples: Sequence[Any]) -> Program:
        """A torch graph of ark's operators. examples: tensors like its inputs, or fake ones."""
        built = build(module, examples)
        with ark.use_model(built.model):
            taken: set[int] = set()
            outputs = [own(v, taken) if isinstance(v, Value) else v for v in built.outputs]
        kept = [t.detach().contiguous() for _, t in held(module)]
        return cls(built.model, built.inputs, outputs, kept)

    def __call__(self, *given: Any, iterations: int = 1) -> list[Any]:
        """The graph's results as new tensors, behind one launch of so many iterations."""
        if len(given) + len(self._held) != len(self._inputs):
            raise InvalidUsageError(
                f"{len(given)} tensors were given; expected {len(self._inputs) - len(self._held)}"
            )
        kinds = [(t.shape, t.dtype, t.device, t.layout) for t in given]
        if kinds != self._kinds:
            self._check((*given, *self._held))
            self._kinds = kinds
        inputs = [t if t.is_contiguous() else t.contiguous() for t in (*given, *self._held)]
        where = inputs[0].device if inputs else torch.device("cpu")
        made = [
            torch.empty(v.shape, dtype=v.dtype, device=where) if isinstance(v, Value) else v
            for v in self._outputs
        ]
        addresses = [t.data_ptr() for t in (*inputs, *made) if isinstance(t, torch.Tensor)]
        if addresses != self._addresses:
            self._move(addresses)
        assert self._executor is not None
        if self._device.dlpack[0] == HOST:
            self._executor.resume(iterations).wait()
        else:
            self._on_stream(where, iterations)
        return made

    def _check(self, inputs: Sequence[torch.Tensor]) -> None:
        """The tensors' device is ark's, and shapes and types are those of the plan."""
        for tensor, value in zip(inputs, self._inputs, strict=True):
            if tensor.layout != torch.strided:
                raise InvalidUsageError(
                    f"a tensor has the layout {tensor.layout}; call to_dense() on it before"
                )
            if tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype:
                raise InvalidUsageError(
                    f"a tensor is {tensor.dtype} {list(tensor.shape)}; the kernel is made for "
                    f"{value.dtype} {list(value.shape)}"
                )
            if _place(tensor) != self._device.dlpack[0]:
                raise InvalidUsageError(
                    f"a tensor lies on {tensor.device}, but ark runs on {backend().name}; move the "
                    "module and its inputs there, or call ark.init(backend=...)"
                )

    def _move(self, addresses: Sequence[int]) -> None:
        """Tells the kernel where the tensors of this call lie."""
        found = {i: a for i, a in zip(self._ids, addresses, strict=True) if i is not None}
        if self._executor is None:
            self._executor = load(self._plan, backend(), self._device, externals=found)
        else:
            self._executor.rebind(found)
        self._addresses = list(addresses)

    def _on_stream(self, where: torch.device, iterations: int) -> None:
        """Behind what the caller has queued, as DLPack's stream rule asks."""
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "ark's kernels count their launches, so a captured graph cannot replay one; call "
                "the compiled module outside of the capture"
            )
        stream = torch.cuda.current_stream(where)
        assert self._executor is not None
        self._executor.resume(iterations, int(stream.cuda_stream))

    def close(self) -> None:
        """Gives the kernel's memory back."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None


def _place(tensor: torch.Tensor) -> int:
    """DLPack's number for the kind of device; -1 for one that has none, such as meta."""
    try:
        return int(tensor.__dlpack_device__()[0])
    except (BufferError, ValueError, RuntimeError, NotImplementedError):
        return -1


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
