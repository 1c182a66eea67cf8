"""Runs a loaded ONNX model on NumPy arrays, in loop kernels (persistent kernels that execute the
whole graph). Created by ark.from_onnx.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import ark
from ark.errors import InvalidUsageError, UnsupportedError
from ark.frontend.foreign import as_array
from ark.interop.kernels import Kernels
from ark.interop.onnx import host, load
from ark.interop.onnx.buckets import Shapes, padded, rounded
from ark.interop.onnx.convert import Built, build
from ark.interop.onnx.port import Port
from ark.interop.onnx.stages import Stages, StagesNeededError
from ark.interop.onnx.values import TABLE, ContentsNeededError, Shape, Value, narrowed
from ark.plan.cost import busied
from ark.plan.serialize import machine_of
from ark.runtime.inline import InlineRuns, inline_runs

MAX_REMEMBERED_SIZES = 4096  # the most size combinations for which a model caches the rounded sizes


class OnnxModel:
    """An ONNX model that runs on NumPy arrays.

    One loop kernel is planned and compiled for every combination of sizes. Sizes are rounded up if
    the operators permit it, and recently used kernels are cached. Threads may share a model; their
    calls run one after the other.

    Some operators need the contents of an input while the graph is built, for example Reshape the
    contents of its input `shape`. A kernel is then valid for these contents only; other contents
    need another kernel.
    """

    def __init__(self, proto: onnx.ModelProto, name: str, depth: int = 0) -> None:
        """depth: how many stages precede this model, if it is a stage of a larger model."""
        load.missing(proto, name, TABLE)
        weights = {t.name for t in proto.graph.initializer}
        self.name = name
        ports = [Port(i, "input") for i in proto.graph.input]
        self.inputs = [p for p in ports if p.name not in weights]
        self.defaults = [p for p in ports if p.name in weights]  # inputs that may be omitted
        self.outputs = [Port(o, "output") for o in proto.graph.output]
        self._proto = proto
        self._known: set[str] = set()
        self._kernels: Kernels[Launched] = Kernels(_end)
        self._rounded: Kernels[tuple[Shapes, Shapes]] = Kernels(
            lambda sizes: None, MAX_REMEMBERED_SIZES
        )
        # Calls from several threads run one after another, because a kernel has one set of input
        # buffers.
        self._turn = threading.RLock()
        self._closed = False
        self._stages: Stages | None = None
        self._depth = depth
        sizes = {p.name: (p.sizes, p.dtype) for p in self.inputs if p.sizes is not None}
        if len(sizes) == len(self.inputs):
            with suppress(ContentsNeededError):  # some contents are known only at the first run
                build(proto, sizes, {})  # reports errors when the model is loaded

    def __call__(self, *arrays: Any, **named: Any) -> list[np.ndarray]:
        """Runs the model once. Arrays are given in the order of `inputs`, or by name."""
        return self.run({**self._by_place(arrays), **named})

    def _by_place(self, arrays: Sequence[Any]) -> dict[str, Any]:
        if len(arrays) > len(self.inputs):
            raise InvalidUsageError(f"{len(arrays)} arrays were given for the inputs {self.inputs}")
        return {p.name: a for p, a in zip(self.inputs, arrays, strict=False)}

    def run(self, inputs: Mapping[str, Any]) -> list[np.ndarray]:
        """Runs the model once. inputs: arrays by input name. Returns the outputs in the model's
        order.
        """
        arrays = self.checked(inputs)
        with self._turn:
            if self._closed:
                raise InvalidUsageError(f"{self.name} was closed; load it again with ark.from_onnx")
            kernel = self._launched(arrays)
            if kernel is None:
                assert self._stages is not None
                return self._typed(self._stages.run(arrays))
            launched, results = kernel
            self.write(launched.built, arrays)
            if launched.inline is not None and launched.inline.short():
                launched.inline()
            else:
                with DEVICE:
                    launched.runtime.run()
            wide = self.read(launched.built)
            return [_cut(a, results[p.name]) for a, p in zip(wide, self.outputs, strict=True)]

    def graph(self, inputs: Mapping[str, Any], into: ark.Model | None = None) -> Built:
        """Builds the graph for these arrays, as a part of the model `into`, for callers that launch
        it themselves.

        After the launch, `write` fills the inputs and `read` returns the outputs. Raises
        StagesNeededError if the model needs more than one graph.
        """
        arrays = self.checked(inputs)
        while self._stages is None:
            try:
                self._built(arrays, {n: arrays[n] for n in self._known})
                return self._built(arrays, {n: arrays[n] for n in self._known}, into)
            except ContentsNeededError as error:
                self._learn(error, arrays)
        raise StagesNeededError(
            f"{self.name} runs in stages, so it cannot be a part of another model"
        )

    def write(self, built: Built, inputs: Mapping[str, Any]) -> None:
        """Fills the input tensors of a launched graph. Arrays of smaller shapes are padded with
        zeros.
        """
        for name, value in built.inputs.items():
            assert value.tensor is not None
            value.tensor.from_numpy(padded(narrowed(inputs[name], name), value.shape))

    def read(self, built: Built) -> list[np.ndarray]:
        """The outputs of a graph that has run."""
        return self._typed([_contents(built.results[p.name]) for p in self.outputs])

    def _typed(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Casts the outputs to the types that the model declares."""
        pairs = zip(arrays, self.outputs, strict=True)
        return [a if p.dtype is None else a.astype(p.dtype, copy=False) for a, p in pairs]

    def close(self) -> None:
        """Frees the kernels' memory. The model cannot be run afterwards."""
        with self._turn:
            self._closed = True
            self._kernels.close()
            if self._stages is not None:
                self._stages.close()

    def checked(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The inputs as arrays. Raises InvalidUsageError if a name, type or shape differs from the
        model's.
        """
        names, optional = {p.name for p in self.inputs}, {p.name for p in self.defaults}
        if set(inputs) - optional != names:
            raise InvalidUsageError(
                f"{self.name} has the inputs {', '.join(map(str, self.inputs)) or 'none'}; given "
                f"were {', '.join(map(repr, inputs)) or 'none'}"
            )
        arrays, sizes = {}, dict[str, int]()
        for port in (*self.inputs, *(p for p in self.defaults if p.name in inputs)):
            array = as_array(inputs[port.name])
            fits = port.shape is None or len(port.shape) == array.ndim
            for wanted, n in zip(port.shape or (), array.shape, strict=False):
                if isinstance(wanted, str):
                    fits &= wanted == "?" or sizes.setdefault(wanted, n) == n
                else:
                    fits &= wanted == n
            if array.dtype != port.dtype or not fits:
                raise InvalidUsageError(
                    f"the input is {port}, but the array is {array.dtype} {list(array.shape)}"
                    + (f" where {sizes}" if sizes else "")
                )
            arrays[port.name] = array
        return arrays

    def _launched(self, arrays: Mapping[str, np.ndarray]) -> tuple[Launched, Shapes] | None:
        """Returns the kernel for these sizes (rounded up if permitted) and known contents, and the
        exact shapes of the results. It is planned and compiled if the cache does not have it.
        Returns None if the model runs in stages.
        """
        while self._stages is None:
            try:
                return self._kernel(arrays, {n: arrays[n] for n in sorted(self._known)})
            except ContentsNeededError as error:
                self._learn(error, arrays)
        return None

    def _kernel(
        self, arrays: Mapping[str, np.ndarray], known: Mapping[str, np.ndarray]
    ) -> tuple[Launched, Shapes]:
        def built(shapes: Shapes) -> Built:
            sizes = {n: (shapes[n], a.dtype) for n, a in arrays.items()}
            return build(self._proto, sizes, known)

        exact = {n: a.shape for n, a in arrays.items()}
        contents = tuple((n, a.tobytes()) for n, a in known.items())
        wide, results = self._rounded.get(
            (tuple(exact.items()), contents), lambda: rounded(exact, self._symbols(), built)
        )
        key = tuple(wide.items()), contents
        return self._kernels.get(key, lambda: _launch(built(wide))), results

    def _symbols(self) -> dict[str, list[str]]:
        """For each input, the names of its dimensions, or nothing if it must not be padded."""
        symbols = {}
        for port in self.inputs:
            if port.name not in self._known and port.shape is not None:
                names = [n if isinstance(n, str) else "" for n in port.shape]
                symbols[port.name] = [
                    f"{port.name}[{d}]" if n == "?" else n for d, n in enumerate(names)
                ]
        return symbols

    def _built(
        self,
        arrays: Mapping[str, np.ndarray],
        known: Mapping[str, np.ndarray],
        into: ark.Model | None = None,
    ) -> Built:
        sizes = {n: (a.shape, a.dtype) for n, a in arrays.items()}
        return build(self._proto, sizes, known, into)

    def _learn(self, error: ContentsNeededError, arrays: Mapping[str, np.ndarray]) -> None:
        """Handles an error that states that the graph depends on the contents of inputs. The
        contents of small inputs become part of the kernels' key. If an input is larger, the model
        runs in stages (several kernels) from now on.
        """
        on_host = self._proto.graph.node[error.place].op_type in host.OPERATORS
        new = {n: arrays[n] for n in error.inputs - self._known}
        most = {n: MAX_DECIDING_ELEMENTS if a.dtype.kind in "iub" else 8 for n, a in new.items()}
        if new and not on_host and all(a.size <= most[n] for n, a in new.items()):
            self._known |= new.keys()
            return

        def part(proto: onnx.ModelProto, depth: int) -> OnnxModel:
            return OnnxModel(proto, self.name, depth)

        try:
            self._stages = Stages(self._proto, error.place, on_host, self._depth, part)
        except UnsupportedError:
            if not new:
                raise
            # The input itself may be large, if only small values that are computed from it become
            # part of the kernel's key.
            self._known |= new.keys()


MAX_DECIDING_ELEMENTS = 64  # limit of an integer input that is part of a kernel's key
DEVICE = threading.RLock()  # only one kernel is launched at a time


@dataclass(frozen=True)
class Launched:
    """A planned and compiled graph that is loaded on the device. inline: runs it on the calling
    thread; None if that is not possible.
    """

    built: Built
    runtime: ark.Runtime
    inline: InlineRuns | None


def _launch(built: Built) -> Launched:
    with DEVICE, ark.use_model(built.model):
        runtime, planner = ark.Runtime(), ark.Planner(-1, built.model)
        plan = planner.plan()
        if plan.inner is not None:
            machine = machine_of(plan.inner)
            busy = busied(plan.inner, machine)
            if busy < machine.processors:
                planner.machine = machine.with_processors(busy)
                plan = planner.plan()
        runtime.launch(plan, loop_mode=False)
        fill(built)
    there = runtime.executor
    return Launched(built, runtime, inline_runs(there) if there is not None else None)


def _end(launched: Launched) -> None:
    launched.runtime.stop()


def _cut(array: np.ndarray, shape: Shape) -> np.ndarray:
    """The leading part of the array with this shape. It is a copy, unless it is the whole array."""
    if array.shape == shape:
        return array
    part: np.ndarray = array[tuple(slice(0, n) for n in shape)]
    return np.array(part, order="C")


def fill(built: Built) -> None:
    """Writes the constants (weights) of a launched graph."""
    for tensor, array in built.constants:
        tensor.from_numpy(array)


def _contents(value: Value) -> np.ndarray:
    if value.array is not None:
        return np.array(value.array, order="C")
    if value.tensor is None:
        raise UnsupportedError("a result that is a sequence is not supported")
    return value.tensor.to_numpy().reshape(value.shape).astype(value.dtype, copy=False)


def from_onnx(path: Any, dims: Mapping[str, int] | None = None) -> OnnxModel:
    """An ONNX file as a model; see ark.from_onnx."""
    return OnnxModel(load.read(path, dims), Path(path).name)


def from_proto(proto: onnx.ModelProto, name: str = "the model") -> OnnxModel:
    """A model from a ModelProto in memory."""
    proto = load.checked(proto, name, None)
    return OnnxModel(load.expanded(proto, name), name)
