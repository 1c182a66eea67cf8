"""Indices of the largest or smallest elements: argmax, argmin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.dtype import FLOATS, INTEGERS, DataType, int32, int64
from ark.lower.ops.norms import lower_argmax
from ark.lower.registry import register
from ark.ops.base import index_type, positive_axis, result
from ark.ops.reductions import reduce_axis, reduce_by
from ark.tasks.expression import Tree, index, leaf, number

MIN_SPLIT_ROW_ELEMENTS = 1 << 19  # rows of this size or more are searched by several processors
MAX_INT32 = 2**31 - 1  # the largest int32
LOW_WORD = 2**32 - 1  # the largest value of the low half of an int64
KEYED = (*FLOATS, *(t for t in INTEGERS if t.bits <= 32 and t.name != "uint32"))


def _argmax(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    return [inputs[0].argmax(axis=-1, keepdims=True)]


register("argmax", _argmax, lower_argmax, aliasing="none")


def _first_index(
    function: str, input: Any, axis: int, dtype: DataType, last: bool, output: Any, name: str
) -> Tensor:
    """The index along the axis of the largest or smallest element (function "max" or "min"). If
    several elements are equal to it, the result is the smallest of their indices or, if `last` is
    True, the largest.
    """
    tensor = as_tensor(input)
    op = f"arg{function}"
    shape = tensor.ir.shape
    axis = positive_axis(op, axis, len(shape))
    if tensor.ir.dtype in KEYED and shape[axis] <= LOW_WORD:
        return _first_key(function, tensor, axis, dtype, last, output, name or op)
    extreme = reduce_by(function, tensor, axis, True, None, "")
    beyond = -1 if last else shape[axis]
    matches: Tree = ["equal", leaf(0), leaf(1)]
    tree = ["where", matches, index(axis - len(shape)), number(beyond)]
    counted = dtype if shape[axis] > MAX_INT32 else int32
    places = result("elementwise", [tensor, extreme], shape, counted, None, {"expr": tree})
    return reduce_axis("max" if last else "min", places, axis, True, output, name or op, dtype)


def _first_key(
    function: str, tensor: Tensor, axis: int, dtype: DataType, last: bool, output: Any, name: str
) -> Tensor:
    """Computes `_first_index` by a single reduction that reads the elements once. Each element is
    replaced by a 64-bit key. The key's high word is an integer with the same order as the elements,
    and its low word depends on the element's index. The largest key gives the index.
    """
    shape = tensor.ir.shape
    value: Tree = leaf(0)
    if tensor.ir.dtype in FLOATS:  # "order" maps NaN to the largest integer
        value = ["order", value if function == "max" else ["neg", value]]
    elif function == "min":
        value = ["bitwise_not", value]
    place: Tree = index(axis - len(shape))
    place = ["cast", "int64", place] if last else ["sub", number(LOW_WORD), place]
    high = ["mul", ["cast", "int64", value], number(LOW_WORD + 1)]
    tree = {"expr": ["bitwise_or", high, place]}
    keys = result("elementwise", [tensor], shape, int64, None, tree)
    key = reduce_axis("max", keys, axis, True, None, "", int64)
    low: Tree = ["bitwise_and", leaf(0), number(LOW_WORD)]
    expr: Tree = low if last else ["sub", number(LOW_WORD), low]
    return result("elementwise", [key], key.ir.shape, dtype, output, {"expr": expr}, name=name)


def _arg(
    function: str, input: Any, output: Any, name: str, axis: int, dtype: DataType, last: bool
) -> Tensor:
    tensor = as_tensor(input)
    index_type(f"arg{function}", dtype)
    rank = len(tensor.ir.shape)
    rows = function == "max" and tensor.ir.dtype in FLOATS and axis in (-1, rank - 1)
    if rows and not last and tensor.ir.shape[-1] < MIN_SPLIT_ROW_ELEMENTS:
        shape = (*tensor.ir.shape[:-1], 1)
        return result("argmax", [tensor], shape, dtype, output, name=name)
    return _first_index(function, tensor, axis, dtype, last, output, name)


def argmax(
    input: TensorLike,
    output: Output = None,
    name: str = "",
    *,
    axis: int = -1,
    dtype: DataType = int32,
    last: bool = False,
) -> Tensor:
    """The index of the largest element along `axis`, whose size in the result is 1.

    input: floating point, where NaN counts as the largest, or integers. Of equal elements it is the
    first, or with `last` the last. dtype: the result's type, int32 or int64.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.argmax(x).eval()
        tensor([[2],
                [2]], dtype=torch.int32)
    """
    return _arg("max", input, output, name, axis, dtype, last)


def argmin(
    input: TensorLike,
    output: Output = None,
    name: str = "",
    *,
    axis: int = -1,
    dtype: DataType = int32,
    last: bool = False,
) -> Tensor:
    """The index of the smallest element along `axis`; NaN is the smallest. Otherwise as argmax.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.argmin(x, axis=0).eval()
        tensor([[0, 0, 0]], dtype=torch.int32)
    """
    return _arg("min", input, output, name, axis, dtype, last)
