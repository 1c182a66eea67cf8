"""Types for the conversion of a torch graph: values (tensors of the graph), calls (nodes to
convert), and the table of operators. Used by all modules of ark.interop.torch.

Tensors of ark have at least one dimension, but torch has tensors without dimensions. So a value has
torch's shape in addition to its tensor. An entry of the table is a function whose arguments are a
`Call` and the operator's arguments, in the order of the operator's schema, with values for tensors.
The result of the function is converted to the shapes and types that torch computed for the node.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

import ark
from ark.errors import InvalidUsageError, UnsupportedError
from ark.ir.dtype import DataType


@dataclass
class Value:
    """A tensor of the graph, with torch's shape and type."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: ark.Tensor


@dataclass
class Call:
    """The node that is being converted. expected: the shapes and types of its results. used: for
    each result, True if it is used.
    """

    expected: Sequence[tuple[tuple[int, ...], torch.dtype]]
    used: Sequence[bool]

    @property
    def shape(self) -> tuple[int, ...]:
        """The first result's shape."""
        return self.expected[0][0]

    @property
    def dtype(self) -> DataType:
        """The first result's type."""
        return data_type(self.expected[0][1])

    def wants(self, place: int) -> bool:
        """True if the result with this number is used."""
        return self.used[place]


Operator = Callable[..., Any]
TABLE: dict[str, Operator] = {}
_Function = TypeVar("_Function", bound=Operator)


def operator(*names: str) -> Callable[[_Function], _Function]:
    """A decorator that registers a function for ATen overloads by their names ("add.Tensor")."""

    def enter(function: _Function) -> _Function:
        for name in names:
            TABLE[name] = function
        return function

    return enter


def refuse(form: str) -> UnsupportedError:
    """The error for an unsupported use of an operator. form: the use, such as "a product of
    integers".
    """
    return UnsupportedError(f"{form} is not supported")


def data_type(dtype: torch.dtype) -> DataType:
    """ark's type for a torch type. Raises UnsupportedError if there is none."""
    try:
        return DataType.from_torch(dtype)
    except InvalidUsageError as error:
        raise UnsupportedError(f"the type {dtype} is not supported") from error


def input_of(shape: Sequence[int], dtype: torch.dtype) -> Value:
    """A value in memory that the caller owns. Raises UnsupportedError for tensors that ark cannot
    represent.
    """
    sizes = tuple(int(n) for n in shape)
    if math.prod(sizes) == 0:
        raise refuse(f"a tensor without elements, of shape {list(sizes)},")
    return Value(sizes, dtype, ark.placeholder(list(sizes) or [1], data_type(dtype)))


def fitted(tensor: ark.Tensor, shape: Sequence[int], dtype: torch.dtype) -> Value:
    """A value with torch's shape and type, on a tensor that may have another shape and type."""
    wanted = data_type(dtype)
    if math.prod(shape) == 0:
        raise refuse(f"a tensor without elements, of shape {list(shape)},")
    if tensor.ir.dtype != wanted:
        tensor = ark.cast(tensor, wanted)
    sizes = tuple(shape) or (1,)
    if tensor.ir.shape != sizes:
        tensor = ark.reshape(tensor, list(sizes))
    return Value(tuple(shape), dtype, tensor)


def cast(value: Any, dtype: DataType) -> Any:
    """The tensor of a value, cast to a type. Numbers are returned unchanged."""
    if not isinstance(value, Value):
        return value
    return value.tensor if value.tensor.ir.dtype == dtype else ark.cast(value.tensor, dtype)


def floating(value: Value) -> ark.Tensor:
    """The tensor of a value; if its type is not floating point, cast to fp32."""
    return value.tensor if value.dtype.is_floating_point else ark.cast(value.tensor, ark.fp32)


def promoted(*values: Any) -> DataType:
    """The type in which torch computes with these values and numbers, by torch's rules of type
    promotion.
    """
    total: Any = None
    for value in values:
        one = value
        if isinstance(value, Value):
            one = torch.empty([1] * min(1, len(value.shape)), dtype=value.dtype, device="meta")
        total = (
            one
            if total is None
            else torch.empty(
                [1] * max(_rank(total), _rank(one)),
                dtype=torch.result_type(total, one),
                device="meta",
            )
        )
    if not isinstance(total, torch.Tensor):
        total = torch.tensor(total)
    return data_type(total.dtype)


def _rank(value: Any) -> int:
    return value.dim() if isinstance(value, torch.Tensor) else 0


def axis_of(axis: int, rank: int) -> int:
    """A non-negative axis."""
    return axis % rank if rank else 0


def axes_of(axes: Any, rank: int) -> list[int]:
    """The axes as non-negative numbers. None or an empty list means all axes."""
    listed = [axes] if isinstance(axes, int) else list(axes or [])
    return sorted({axis_of(a, rank) for a in listed}) or list(range(max(rank, 1)))


def number(value: Any, dtype: ark.DataType) -> Any:
    """A number that is combined with a tensor. It becomes a float if the type is floating point."""
    if isinstance(value, Value):
        return value
    return float(value) if dtype in (ark.fp32, ark.fp16, ark.bf16) else value


def in_order(value: Value, order: tuple[int, ...] | None) -> Value:
    """The value with its dimensions in the given order; unchanged if that is None."""
    if order is None or order == tuple(range(len(order))):
        return value
    return dataclasses.replace(value, tensor=ark.transpose(value.tensor, list(order)))


def own(value: Value, taken: set[int]) -> Value:
    """A result in memory of its own. It is a copy if the value is an input, a view, or an earlier
    result. taken: the buffers of earlier results.
    """
    tensor = value.tensor.ir
    alone = tensor.buffer.arena == "activation" and tensor.nbytes == tensor.buffer.nbytes
    if not alone or tensor.buffer.id in taken:
        value = dataclasses.replace(value, tensor=ark.copy(value.tensor))
    taken.add(value.tensor.ir.buffer.id)
    return value
