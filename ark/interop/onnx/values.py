"""Types of the conversion: values, calls of operators, and the table of operators.

ark's tensors have at least one dimension, ONNX's may have none; so a value has ONNX's shape in
addition to its tensor. A value whose contents are known while the graph is built is a NumPy array.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx

import ark
from ark.errors import ModelError, UnsupportedError
from ark.ir.dtype import DataType

Shape = tuple[int, ...]


@dataclass
class Value:
    """A tensor, an array that is known while the graph is built, or a sequence of values (items).

    inputs: names of the model's inputs that it depends on. kind: its type, if ark lacks the type
    and another one carries it.
    """

    shape: Shape
    tensor: ark.Tensor | None = None
    array: np.ndarray | None = None
    inputs: frozenset[str] = frozenset()
    items: tuple[Value, ...] | None = None
    kind: Any = None

    def __post_init__(self) -> None:
        if self.array is not None:
            self.kind = kind_of(self.array.dtype)

    @property
    def dtype(self) -> Any:
        """The NumPy type of its elements in ONNX."""
        if self.kind is not None:
            return self.kind
        if self.array is not None:
            return self.array.dtype
        if self.tensor is None:
            raise ModelError("a tensor is expected where a sequence is given")
        return np.dtype(self.tensor.ir.dtype.numpy)


class NeedsContents(Exception):
    """Raised if an operator needs contents that are known only at run time.

    inputs: the model's inputs that the contents depend on. place: the index of the operator's node
    in the outermost graph.
    """

    def __init__(self, inputs: frozenset[str]) -> None:
        super().__init__()
        self.inputs, self.place = inputs, 0


# Types that ark does not compute with, and types that represent all of their values. A uint64 is
# carried by the int64 of the same bits.
CARRIERS = {
    **{np.dtype(t): ark.int32 for t in (np.int16, np.uint16)},
    **{np.dtype(getattr(ml_dtypes, n)): ark.int32 for n in ("int4", "uint4", "int2", "uint2")},
    np.dtype(np.uint64): ark.int64,
    **{
        np.dtype(getattr(ml_dtypes, name)): ark.fp32
        for name in ("float4_e2m1fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    },
}


def kind_of(dtype: Any) -> Any:
    """The NumPy type itself if another one carries it, else None."""
    return np.dtype(dtype) if np.dtype(dtype) in CARRIERS else None


def data_type(dtype: Any) -> DataType:
    """The type of ark for a NumPy type, or the type that carries it. fp32 stands for float64 and
    loses digits. Raises UnsupportedError if there is no such type.
    """
    if np.dtype(dtype) == np.float64:
        _warn_of_float64()
        return ark.fp32
    if np.dtype(dtype) in CARRIERS:
        return CARRIERS[np.dtype(dtype)]
    for one in (*ark_types(), ark.bool):
        if np.dtype(one.numpy) == np.dtype(dtype):
            return one
    raise UnsupportedError(f"the element type {np.dtype(dtype)} is not supported")


@cache
def _warn_of_float64() -> None:
    """Warns once per process."""
    warnings.warn(
        "float64 tensors of ONNX models are computed in float32: ark has no type of 64 bits",
        stacklevel=2,
    )


def narrowed(array: np.ndarray, name: str) -> np.ndarray:
    """The array in a type of ark; float64 becomes float32. Raises UnsupportedError if a value is
    too large.
    """
    if array.dtype != np.float64:
        carrier = CARRIERS.get(array.dtype)
        return array if carrier is None else array.astype(carrier.numpy)
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    if np.any(np.isinf(narrow) & np.isfinite(array)):
        raise UnsupportedError(
            f"{name} holds float64 values that float32 cannot represent; scale them down"
        )
    return narrow


def ark_types() -> tuple[DataType, ...]:
    """The types of one or more whole bytes that tensors of a converted graph may have."""
    return (
        ark.fp32,
        ark.fp16,
        ark.bf16,
        ark.int64,
        ark.int32,
        ark.uint32,
        ark.int8,
        ark.uint8,
        ark.fp8_e4m3,
        ark.fp8_e5m2,
    )


@dataclass
class Call:
    """A node to convert: its inputs, attributes and the version of its operator's definition.

    bodies: the graphs within the node. whole_inputs: names of the model's inputs that contain
    integers.
    """

    op: str
    inputs: list[Value | None]
    attributes: dict[str, Any]
    outputs: list[str]
    version: int
    constants: list[tuple[ark.Tensor, np.ndarray]] = field(default_factory=list)
    bodies: dict[str, Body] = field(default_factory=dict)
    whole_inputs: frozenset[str] = frozenset()

    def has(self, place: int) -> bool:
        """True if this optional input is present."""
        return place < len(self.inputs) and self.inputs[place] is not None

    def value(self, place: int) -> Value:
        """The input; ModelError if it is missing."""
        value = self.inputs[place] if place < len(self.inputs) else None
        if value is None:
            raise ModelError(f"input {place} is missing")
        return value

    def shape(self, place: int) -> Shape:
        """The input's shape, as ONNX has it."""
        return self.value(place).shape

    def tensor(self, place: int) -> ark.Tensor:
        """The input as a tensor of the graph."""
        return self.on(self.value(place))

    def on(self, value: Value) -> ark.Tensor:
        """A value as a tensor of the graph."""
        if value.tensor is None:
            if value.array is None:
                raise ModelError("a tensor is expected where a sequence is given")
            if not value.array.size:  # empty: operators on it are computed while the graph is built
                raise NeedsContents(
                    frozenset().union(*(v.inputs for v in self.inputs if v and v.array is None))
                )
            value.tensor = self.constant(value.array)
        return value.tensor

    def constant(self, array: np.ndarray) -> ark.Tensor:
        """A tensor of the graph whose contents are known."""
        dtype, array = data_type(array.dtype), narrowed(array, "a constant")
        if not array.size:
            raise UnsupportedError(f"a tensor without elements, of shape {list(array.shape)}")
        shape = list(array.shape) or [1]
        if array.size == 1 and np.isfinite(np.float64(array.item())):
            return ark.constant(array.item(), shape, dtype)
        tensor = ark.parameter(shape, dtype)
        self.constants.append((tensor, array))
        return tensor

    def dtype(self, place: int) -> DataType:
        """The type of the input, or the type that carries it. Raises UnsupportedError if there is
        none.
        """
        value = self.value(place)
        return data_type(value.dtype) if value.tensor is None else value.tensor.ir.dtype

    def array(self, place: int) -> np.ndarray:
        """The contents of the input. Raises NeedsContents if they are known only at run time."""
        return self.known(self.value(place))

    def known(self, value: Value | None) -> np.ndarray:
        """The contents of a value. Raises NeedsContents if they are known only at run time."""
        if value is None or value.items is not None:
            raise ModelError("a tensor is expected where a sequence or nothing is given")
        if value.array is None:
            raise NeedsContents(value.inputs)
        return value.array

    def decides(self, place: int) -> bool:
        """True if the input depends only on inputs of the model that contain integers."""
        return self.value(place).inputs <= self.whole_inputs

    def integers(self, place: int) -> list[int]:
        """The contents of an input of integers."""
        return [int(n) for n in self.array(place).reshape(-1)]

    def attribute(self, name: str, default: Any = None) -> Any:
        """The value of an attribute; str for texts."""
        return self.attributes.get(name, default)


@dataclass(frozen=True)
class Step:
    """A converted node and its results."""

    call: Call
    results: list[Value | None]


@dataclass(frozen=True)
class Body:
    """A graph within a node. A call with its inputs adds it to the graph that is being built."""

    graph: onnx.GraphProto
    build: Callable[[onnx.GraphProto, Sequence[Value | None]], list[Value | None]]

    def __call__(self, given: Sequence[Value | None]) -> list[Value | None]:
        """The results of the graph for these inputs."""
        return self.build(self.graph, given)

    @property
    def operators(self) -> set[str]:
        """The operator names of the graph's nodes."""
        return {node.op_type for node in self.graph.node}

    def result_type(self, place: int) -> Any:
        """The NumPy type of a result that the graph declares."""
        elements = self.graph.output[place].type.tensor_type.elem_type
        return onnx.helper.tensor_dtype_to_np_dtype(elements)


Operator = Callable[[Call], Any]
TABLE: dict[str, Operator] = {}


def operator(*names: str) -> Callable[[Operator], Operator]:
    """A decorator that registers a function for these operators in the table."""

    def enter(function: Operator) -> Operator:
        for name in names:
            TABLE[name] = function
        return function

    return enter


def shaped(tensor: Any, shape: Sequence[int]) -> Value:
    """A value of ONNX's shape on a tensor, reshaped if the tensor has another shape."""
    shape = tuple(int(n) for n in shape)
    if math.prod(shape) == 0:
        return Value(shape, array=np.zeros(shape, tensor.ir.dtype.numpy))
    wanted = shape or (1,)
    if tensor.ir.shape != wanted:
        tensor = ark.reshape(tensor, list(wanted))
    return Value(shape, tensor)


def in_fp32(function: Callable[[Any], Any], tensor: Any) -> Any:
    """function(tensor), computed in fp32 for 16-bit tensors, because squares overflow fp16."""
    dtype = tensor.ir.dtype
    if dtype not in (ark.fp16, ark.bf16):
        return function(tensor)
    return ark.cast(function(ark.cast(tensor, ark.fp32)), dtype)


def join(call: Call, values: Sequence[Value], axis: int) -> Value:
    """The concatenation of values along an axis."""
    full = [v for v in values if 0 not in v.shape]
    if all(v.array is not None for v in values):
        array = np.concatenate([v.array for v in values if v.array is not None], axis)
        return Value(array.shape, array=array)
    shape = list(full[0].shape)
    shape[axis] = sum(v.shape[axis] for v in full)
    joined = shaped(ark.concat([call.on(v) for v in full], axis), shape)
    joined.inputs = frozenset[str]().union(*(v.inputs for v in values))
    joined.kind = full[0].kind
    return joined


def axis_of(axis: int, rank: int) -> int:
    """A non-negative axis; ModelError if it is out of range."""
    if not -rank <= axis < max(rank, 1):
        raise ModelError(f"axis {axis} is out of range for {rank} dimensions")
    return axis % rank if rank else 0


def refuse(form: str) -> UnsupportedError:
    """The error for a form of an operator that is not supported."""
    return UnsupportedError(f"{form} is not supported")
