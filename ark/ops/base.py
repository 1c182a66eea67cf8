"""Helpers for the modules of ark.ops: they add a node to the model, compute broadcast shapes, and
check types and axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ark.errors import InvalidUsageError, ModelError
from ark.frontend.model import Model
from ark.frontend.tensor import Tensor, as_tensor
from ark.ir import dtype as dtypes
from ark.ir.dtype import DataType
from ark.ir.values import MAX_DIM_ELEMENTS, MAX_DIMS, whole


def broadcast(a: Sequence[int], b: Sequence[int], op: str) -> tuple[int, ...]:
    """The shape to which the shapes a and b broadcast. Raises ModelError if they do not."""
    rank = max(len(a), len(b))
    left = (1,) * (rank - len(a)) + tuple(a)
    right = (1,) * (rank - len(b)) + tuple(b)
    out = []
    for x, y in zip(left, right, strict=True):
        if x != y and 1 not in (x, y):
            raise ModelError(
                f"{op}: shapes {list(a)} and {list(b)} do not broadcast ({x} against {y}); "
                "each pair of dimensions must be equal or 1"
            )
        out.append(max(x, y))
    return tuple(out)


def check_dims(op: str, shape: Any) -> tuple[int, ...]:
    """A shape as a tuple; raises InvalidUsageError unless it is a list of at most MAX_DIMS sizes
    above 0.
    """
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise InvalidUsageError(f"{op}: the shape {shape!r} is not a list of sizes")
    dims = tuple(whole(op, n) for n in shape)
    if len(dims) > MAX_DIMS or any(not 1 <= n <= MAX_DIM_ELEMENTS for n in dims):
        raise InvalidUsageError(
            f"{op}: the shape {list(dims)} must have at most {MAX_DIMS} dimensions, all of them "
            f"from 1 to {MAX_DIM_ELEMENTS}"
        )
    return dims or (1,)


def result(
    type: str,
    inputs: Sequence[Any],
    shape: Sequence[int],
    dtype: DataType,
    output: Any = None,
    attrs: Mapping[str, Any] | None = None,
    name: str = "",
) -> Tensor:
    """Adds a node with one output to the current model and returns the output's tensor."""
    model = Model.get_model()
    tensors = [as_tensor(t) for t in inputs]
    if output is None:
        label = model.graph.scoped(name or type) if model.graph.scopes else name
        tensor = model.new_tensor(shape, dtype, name=label)
    else:
        target = as_tensor(output).ir
        if target.shape != tuple(shape):
            raise ModelError(
                f"{type}: the output has shape {list(target.shape)}, but the result has "
                f"{list(shape)}; pass an output of the result's shape"
            )
        if target.dtype != dtype:
            raise ModelError(
                f"{type}: the output has type {target.dtype.name}, but the result has "
                f"{dtype.name}; use ark.cast"
            )
        tensor = model.graph.rewrite(target, name)
    model.graph.add(type, [t.ir for t in tensors], [tensor], attrs, name)
    return Tensor(tensor, model)


def same_dtype(op: str, *tensors: Tensor) -> DataType:
    """The type of the tensors. Raises ModelError if they have different types."""
    names = [t.ir.dtype.name for t in tensors]
    if len(set(names)) != 1:
        raise ModelError(f"{op}: the inputs have types {' and '.join(names)}; use ark.cast")
    return tensors[0].ir.dtype


def float_dtype(op: str, tensor: Tensor) -> DataType:
    """The tensor's type; raises ModelError unless it is a floating-point type."""
    if tensor.ir.dtype not in dtypes.FLOATS:
        raise ModelError(
            f"{op} needs fp32, fp16 or bf16, but the input is {tensor.ir.dtype.name}; use ark.cast"
        )
    return tensor.ir.dtype


def index_type(op: str, dtype: DataType) -> DataType:
    """`dtype`, the type for a result of indices. Raises ModelError unless it is int32 or int64."""
    if dtype not in dtypes.INDICES:
        raise ModelError(
            f"{op}: the indices are {getattr(dtype, 'name', dtype)}; expected int32 or int64: "
            "use ark.cast"
        )
    return dtype


def index_dtype(op: str, tensor: Tensor) -> DataType:
    """The type of a tensor of indices. Raises ModelError unless it is int32 or int64."""
    return index_type(op, tensor.ir.dtype)


def positive_axis(op: str, axis: int, rank: int) -> int:
    """`axis` as a number from 0 to rank - 1; a negative one counts from the last dimension. Raises
    InvalidUsageError if it is out of range.
    """
    axis = whole(op, axis)
    if not -rank <= axis < rank:
        raise InvalidUsageError(f"{op}: axis {axis} is out of range for {rank} dimensions")
    return axis % rank
