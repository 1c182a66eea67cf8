"""The types that the conversion of an ONNX model uses: values (inputs and results of nodes), calls
(nodes to convert), and the table of operators. Used by all modules of ark.interop.onnx.

Tensors of ark have at least one dimension, but ONNX has scalars without dimensions. So a value has
ONNX's shape in addition to its tensor. A value whose contents are known while the graph is built is
a NumPy array.
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
from ark.ir.dtype import FLOATS, INTEGERS, SMALL_FLOATS, DataType

Shape = tuple[int, ...]


@dataclass
class Value:
    """A tensor, an array that is known while the graph is built, or a sequence of values (items).

    inputs: names of the model's inputs on which the value depends. kind: the value's ONNX type, if
    ark lacks this type and stores the elements in another type that can represent them.
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
        """The NumPy type that the elements have in ONNX."""
        if self.kind is not None:
            return self.kind
        if self.array is not None:
            return self.array.dtype
        if self.tensor is None:
            raise ModelError("a tensor is required, but a sequence was given")
        return np.dtype(self.tensor.ir.dtype.numpy)


class ContentsNeededError(Exception):
    """Raised if an operator needs contents that are known only at run time.

    inputs: the model's inputs on which the contents depend. place: the index, in the outermost
    graph, of the node that needs them.
    """

    def __init__(self, inputs: frozenset[str]) -> None:
        super().__init__()
        self.inputs, self.place = inputs, 0


# For each type that ark does not compute with, a type that can represent all of its values.
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
    """Returns the NumPy type itself if another type carries it, otherwise None."""
    return np.dtype(dtype) if np.dtype(dtype) in CARRIERS else None


def data_type(dtype: Any) -> DataType:
    """ark's type for a NumPy type: the same type, or the type that carries it. float64 becomes
    fp32, which has fewer digits. Raises UnsupportedError if there is no type.
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
    """Warns that float64 is computed in fp32, once per process."""
    warnings.warn(
        "float64 tensors of ONNX models are computed in float32, because ark has no 64-bit "
        "floating-point type",
        stacklevel=2,
    )


def narrowed(array: np.ndarray, name: str) -> np.ndarray:
    """The array in a type of ark; float64 becomes float32. Raises UnsupportedError if a value is
    too large for the new type.
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
    return (*FLOATS, *(t for t in INTEGERS if t is not ark.byte), *SMALL_FLOATS)


@dataclass
class Call:
    """A node to convert: its inputs, its attributes and the version of its operator's definition.

    bodies: the graphs within the node. whole_inputs: names of the model's inputs that have integer
    types.
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
        """True if the call has this optional input."""
        return place < len(self.inputs) and self.inputs[place] is not None

    def value(self, place: int) -> Value:
        """The input with this number. Raises ModelError if it is missing."""
        value = self.inputs[place] if place < len(self.inputs) else None
        if value is None:
            raise ModelError(f"input {place} is missing")
        return value

    def shape(self, place: int) -> Shape:
        """The shape that the input has in ONNX."""
        return self.value(place).shape

    def tensor(self, place: int) -> ark.Tensor:
        """The input as a tensor of the graph."""
        return self.on(self.value(place))

    def on(self, value: Value) -> ark.Tensor:
        """A value as a tensor of the graph."""
        if value.tensor is None:
            if value.array is None:
                raise ModelError("a tensor is required, but a sequence was given")
            # ark has no tensors without elements, so an operator with such an input cannot become a
            # node of the graph. It is computed while the graph is built instead, for which the
            # contents of its other inputs must be known.
            if not value.array.size:
                raise ContentsNeededError(
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
        no type.
        """
        value = self.value(place)
        return data_type(value.dtype) if value.tensor is None else value.tensor.ir.dtype

    def array(self, place: int) -> np.ndarray:
        """The contents of the input. Raises ContentsNeededError if only a run has them."""
        return self.known(self.value(place))

    def known(self, value: Value | None) -> np.ndarray:
        """The contents of a value. Raises ContentsNeededError if only a run has them."""
        if value is None or value.items is not None:
            raise ModelError("a tensor is required, but a sequence or no value was given")
        if value.array is None:
            raise ContentsNeededError(value.inputs)
        return value.array

    def decides(self, place: int) -> bool:
        """True if input number `place` depends only on inputs of the model with integer types.
        Contents of such inputs may become part of a kernel's key.
        """
        return self.value(place).inputs <= self.whole_inputs

    def integers(self, place: int) -> list[int]:
        """The contents of an integer input, as a list."""
        return [int(n) for n in self.array(place).reshape(-1)]

    def attribute(self, name: str, default: Any = None) -> Any:
        """The value of an attribute. Text is returned as str."""
        return self.attributes.get(name, default)


@dataclass(frozen=True)
class Step:
    """A converted node and its results."""

    call: Call
    results: list[Value | None]


@dataclass(frozen=True)
class Body:
    """A graph within a node. Calling it with inputs adds its nodes to the graph that is being
    built.
    """

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
        """The NumPy type that the graph declares for a result."""
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
    """A value with the given ONNX shape. The tensor is reshaped if it has another shape."""
    shape = tuple(int(n) for n in shape)
    if math.prod(shape) == 0:
        return Value(shape, array=np.zeros(shape, tensor.ir.dtype.numpy))
    wanted = shape or (1,)
    if tensor.ir.shape != wanted:
        tensor = ark.reshape(tensor, list(wanted))
    return Value(shape, tensor)


def in_fp32(function: Callable[[Any], Any], tensor: Any) -> Any:
    """Applies `function` to a tensor. A 16-bit tensor is converted to fp32 before and back
    afterwards, because squares overflow fp16.
    """
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
    """The axis as a non-negative number. Raises ModelError if it is out of range."""
    if not -rank <= axis < max(rank, 1):
        raise ModelError(f"axis {axis} is out of range for {rank} dimensions")
    return axis % rank if rank else 0


def refuse(form: str) -> UnsupportedError:
    """The error for an unsupported use of an operator. form: the use, such as "a pool of int8"."""
    return UnsupportedError(f"{form} is not supported")
