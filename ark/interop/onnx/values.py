"""What flows through a conversion: values, calls of operators, and the table of operators.

ark's tensors have at least one dimension, ONNX's may have none; so a value has ONNX's shape beside
its tensor. A value whose contents are known while the graph is built is a NumPy array.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

import ark
from ark.errors import ModelError, UnsupportedError
from ark.ir.dtype import DataType

Shape = tuple[int, ...]


@dataclass
class Value:
    """A tensor, or an array that is known beforehand. inputs: the model's inputs it comes from."""

    shape: Shape
    tensor: ark.Tensor | None = None
    array: np.ndarray | None = None
    inputs: frozenset[str] = frozenset()


class NeedsContents(Exception):
    """An operator asks for the contents of what is known only when the model runs."""

    def __init__(self, inputs: frozenset[str]) -> None:
        super().__init__()
        self.inputs = inputs


def data_type(dtype: Any) -> DataType:
    """ark's type of a NumPy type, fp32 for float64; UnsupportedError if it has none."""
    if np.dtype(dtype) == np.float64:
        _warn_of_float64()
        return ark.fp32
    for one in (*ark_types(), ark.bool):
        if np.dtype(one.numpy) == np.dtype(dtype):
            return one
    raise UnsupportedError(f"the element type {np.dtype(dtype)} is not built")


@cache
def _warn_of_float64() -> None:
    """Once in a process."""
    warnings.warn(
        "float64 tensors of ONNX models are computed in float32: ark has no type of 64 bits",
        stacklevel=2,
    )


def narrowed(array: np.ndarray, name: str) -> np.ndarray:
    """A float64 array as float32; UnsupportedError if a value is too large for it."""
    if array.dtype != np.float64:
        return array
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    if np.any(np.isinf(narrow) & np.isfinite(array)):
        raise UnsupportedError(
            f"{name} holds float64 values that float32 does not have; scale them down"
        )
    return narrow


def ark_types() -> tuple[DataType, ...]:
    """The types of whole bytes that tensors of a converted graph may have."""
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
    """One node: its inputs, attributes and the version of its operator's definition."""

    op: str
    inputs: list[Value | None]
    attributes: dict[str, Any]
    outputs: list[str]
    version: int
    constants: list[tuple[ark.Tensor, np.ndarray]] = field(default_factory=list)

    def has(self, place: int) -> bool:
        """Was this optional input given?"""
        return place < len(self.inputs) and self.inputs[place] is not None

    def value(self, place: int) -> Value:
        """The input; ModelError if it was left away."""
        found = self.inputs[place] if place < len(self.inputs) else None
        if found is None:
            raise ModelError(f"input {place} is missing")
        return found

    def shape(self, place: int) -> Shape:
        """The input's shape, as ONNX has it."""
        return self.value(place).shape

    def tensor(self, place: int) -> ark.Tensor:
        """The input as a tensor of the graph."""
        value = self.value(place)
        if value.tensor is None:
            assert value.array is not None
            if not value.array.size:  # what it makes is computed beforehand
                raise NeedsContents(
                    frozenset().union(*(v.inputs for v in self.inputs if v and v.array is None))
                )
            value.tensor = self.made(value.array)
        return value.tensor

    def made(self, array: np.ndarray) -> ark.Tensor:
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
        """The input's type; UnsupportedError if ark has none."""
        value = self.value(place)
        if value.tensor is not None:
            return value.tensor.ir.dtype
        assert value.array is not None
        return data_type(value.array.dtype)

    def array(self, place: int) -> np.ndarray:
        """The input's contents, which must be known while the graph is built."""
        value = self.value(place)
        if value.array is None:
            raise NeedsContents(value.inputs)
        return value.array

    def integers(self, place: int) -> list[int]:
        """The contents of an input of integers."""
        return [int(n) for n in self.array(place).reshape(-1)]

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute's value; texts as str."""
        return self.attributes.get(name, default)


@dataclass(frozen=True)
class Step:
    """A node of a graph that was built: what went in, and what came out."""

    call: Call
    results: list[Value]


Made = Value | Sequence[Value]
Operator = Callable[[Call], Any]
TABLE: dict[str, Operator] = {}


def operator(*names: str) -> Callable[[Operator], Operator]:
    """Enters a function into the table under these names."""

    def enter(function: Operator) -> Operator:
        for name in names:
            TABLE[name] = function
        return function

    return enter


def made(tensor: Any, shape: Sequence[int]) -> Value:
    """A value of ONNX's shape on a tensor, which is reshaped where its shape is another one."""
    shape = tuple(int(n) for n in shape)
    if math.prod(shape) == 0:
        return Value(shape, array=np.zeros(shape, tensor.ir.dtype.numpy))
    wanted = shape or (1,)
    if tensor.ir.shape != wanted:
        tensor = ark.reshape(tensor, list(wanted))
    return Value(shape, tensor)


def axis_of(axis: int, rank: int) -> int:
    """A non-negative axis; ModelError if it is out of range."""
    if not -rank <= axis < max(rank, 1):
        raise ModelError(f"axis {axis} is out of range for {rank} dimensions")
    return axis % rank if rank else 0


def refuse(what: str) -> UnsupportedError:
    """The error for a form of an operator that is not built."""
    return UnsupportedError(f"{what} is not built")
