"""The ops where, clip, iota, tril, triu and one_hot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ark.errors import InvalidUsageError, ModelError
from ark.frontend.tensor import Operand, Output, Tensor, TensorLike, as_tensor
from ark.ir.dtype import INTEGERS, DataType, bool_
from ark.ops.base import broadcast, check_dims, result, same_dtype
from ark.ops.elementwise import (
    Number,
    arithmetic,
    copy,
    scalar,
)
from ark.ops.views import reshape
from ark.tasks.expression import Tree, index, leaf, number


def where(
    condition: TensorLike, input: Operand, other: Operand, output: Output = None, name: str = ""
) -> Tensor:
    """input where the condition is True, elsewhere other; all three broadcast.

    condition: bool. input and other: tensors of one type, which has at least 8 bits; one of them
    may be a number. Raises ModelError if the condition is not bool or the types do not fit,
    InvalidUsageError if both values are numbers.

    Examples:
        >>> x = torch.tensor([-1.0, 2.0])
        >>> ark.where(torch.tensor([True, False]), x, 0.0).eval()
        tensor([-1.,  0.])
    """
    test = as_tensor(condition)
    if test.ir.dtype != bool_:
        raise ModelError(
            f"where: the condition is {test.ir.dtype.name}; expected bool, such as a comparison's "
            "result"
        )
    sides = (input, other)
    if all(isinstance(s, Number) for s in sides):
        raise InvalidUsageError(
            "where: both values are Python numbers, which have no data type; pass ark.constant "
            "for one"
        )
    tensors = [as_tensor(s) for s in sides if not isinstance(s, Number)]
    dtype = same_dtype("where", *tensors)
    if dtype.packed:
        raise ModelError(f"where of {dtype.name} is not supported; ark.cast it")
    shape = broadcast(test.ir.shape, tensors[0].ir.shape, "where")
    shape = broadcast(shape, tensors[-1].ir.shape, "where")
    if len(tensors) == 2:
        return result("where", [test, *tensors], shape, dtype, output, name=name)
    parts = [number(scalar("where", s, dtype)) if isinstance(s, Number) else leaf(1) for s in sides]
    if dtype == bool_:
        parts = [["cast", "bool", p] if p[0] == "number" else p for p in parts]
    attrs = {"expr": ["where", leaf(0), *parts]}
    return result("where", [test, *tensors], shape, dtype, output, attrs, name)


def clip(
    input: TensorLike,
    minimum: float | None = None,
    maximum: float | None = None,
    output: Output = None,
    name: str = "",
) -> Tensor:
    """Limits the elements of the input, floating point or integers, to [minimum, maximum].

    minimum, maximum: numbers, or None for no limit.

    Examples:
        >>> ark.clip(torch.tensor([-2.0, 0.5, 2.0]), -1.0, 1.0).eval()
        tensor([-1.0000,  0.5000,  1.0000])
    """
    tensor = as_tensor(input)
    dtype = arithmetic("clip", tensor)
    tree: Tree = leaf(0)
    for function, limit in (("maximum", minimum), ("minimum", maximum)):
        if limit is not None:
            tree = [function, tree, number(scalar("clip", limit, dtype))]
    if tree[0] == "input":
        return copy(tensor, output, name)
    return result("clip", [tensor], tensor.ir.shape, dtype, output, {"expr": tree}, name)


def iota(shape: Sequence[int], axis: int, dtype: DataType, name: str = "") -> Tensor:
    """A tensor in which each element is its index along `axis`. dtype: floating point or integer.

    Raises InvalidUsageError if the axis is out of range.

    Examples:
        >>> ark.iota([2, 3], axis=1, dtype=ark.int32).eval()
        tensor([[0, 1, 2],
                [0, 1, 2]], dtype=torch.int32)
    """
    dims = check_dims("iota", shape)
    if not -len(dims) <= axis < len(dims):
        raise InvalidUsageError(f"iota: axis {axis} is out of range for {len(dims)} dimensions")
    attrs = {"expr": index(axis % len(dims) - len(dims)), "shape": dims}
    return result("iota", [], dims, dtype, None, attrs, name)


def _banded(op: str, input: Any, diagonal: int, lower: bool, output: Any, name: str) -> Tensor:
    tensor = as_tensor(input)
    if len(tensor.ir.shape) < 2 or tensor.ir.dtype.packed:
        raise ModelError(
            f"{op}: the input is {tensor.ir.dtype.name} {list(tensor.ir.shape)}; expected two "
            "dimensions or more, of a type of 8 bits or more"
        )
    distance = ["sub", index(-1), index(-2)]
    keep = ["less_equal" if lower else "greater_equal", distance, number(int(diagonal))]
    nothing: Tree = number(scalar(op, 0, tensor.ir.dtype))
    if tensor.ir.dtype == bool_:
        nothing = ["cast", "bool", nothing]
    attrs = {"expr": ["where", keep, leaf(0), nothing], "shape": tensor.ir.shape}
    return result(op, [tensor], tensor.ir.shape, tensor.ir.dtype, output, attrs, name)


def tril(input: TensorLike, diagonal: int = 0, output: Output = None, name: str = "") -> Tensor:
    """The lower triangle of the last two dimensions; elements above `diagonal` become 0.

    diagonal: 0 is the main diagonal, 1 the next one above it, -1 the next one below. Types of 8
    bits or more. Raises ModelError for fewer than two dimensions.

    Examples:
        >>> ark.tril(torch.ones(2, 2)).eval()
        tensor([[1., 0.],
                [1., 1.]])
    """
    return _banded("tril", input, diagonal, True, output, name)


def triu(input: TensorLike, diagonal: int = 0, output: Output = None, name: str = "") -> Tensor:
    """The upper triangle of the last two dimensions; elements below `diagonal` become 0.

    diagonal, types and errors: as for tril.

    Examples:
        >>> ark.triu(torch.ones(2, 2), 1).eval()
        tensor([[0., 1.],
                [0., 0.]])
    """
    return _banded("triu", input, diagonal, False, output, name)


def one_hot(
    input: TensorLike,
    depth: int,
    dtype: DataType,
    axis: int = -1,
    off: float = 0,
    on: float = 1,
    name: str = "",
) -> Tensor:
    """One-hot encoding: inserts a dimension of size `depth` with `on` at the index, else `off`.

    input: integers, the indices; a negative one counts from the end. For an index out of range all
    elements are `off`. axis: the position of the new dimension in the result. Raises ModelError for
    another type of input, InvalidUsageError if depth or axis are out of range.

    Examples:
        >>> ark.one_hot(torch.tensor([2, 0]), 3, dtype=ark.fp32).eval()
        tensor([[0., 0., 1.],
                [1., 0., 0.]])
    """
    ids = as_tensor(input)
    if ids.ir.dtype not in INTEGERS:
        raise ModelError(f"one_hot: the input is {ids.ir.dtype.name}; expected integers")
    rank = len(ids.ir.shape) + 1
    if depth < 1 or not -rank <= axis < rank:
        raise InvalidUsageError(
            f"one_hot: the depth is {depth} and the axis {axis}, for a result of {rank} "
            "dimensions; expected a depth of at least 1 and an axis of the result"
        )
    place = axis % rank
    dims = (*ids.ir.shape[:place], depth, *ids.ir.shape[place:])
    wide = reshape(ids, [*ids.ir.shape[:place], 1, *ids.ir.shape[place:]])
    at: Tree = ["where", ["less", leaf(0), number(0)], ["add", leaf(0), number(depth)], leaf(0)]
    values = [number(scalar("one_hot", v, dtype)) for v in (on, off)]
    tree = ["where", ["equal", at, index(place - rank)], *values]
    if dtype == bool_:
        tree = ["cast", "bool", tree]
    return result("one_hot", [wide], dims, dtype, attrs={"expr": tree, "shape": dims}, name=name)
