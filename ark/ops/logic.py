"""Elementwise comparisons, logic, selection, and arithmetic of two tensors beyond the basic four.

Comparisons make bool tensors, logic takes and makes them. Broadcasting is NumPy's, either argument
may be a number, the tensors are of one type. Functions: ark.tasks.functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ark.errors import InvalidUsageError, ModelError
from ark.frontend.tensor import NullTensor, Tensor, as_tensor
from ark.ir.dtype import INTEGERS, DataType, bool_
from ark.ops.base import broadcast, check_dims, result, same_dtype
from ark.ops.elementwise import (
    Number,
    arithmetic,
    binary,
    composed,
    copy,
    scalar,
    unary,
)
from ark.ops.views import reshape
from ark.tasks.expression import Tree, index, leaf, number


def less(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """input < other, as bool, with broadcasting; either may be a number.

    Floating point, or integers, of one type. ModelError if shapes do not broadcast or types differ.
    """
    return binary("less", input, other, output, name, bool_)


def less_equal(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """input <= other, as bool. As less otherwise."""
    return binary("less_equal", input, other, output, name, bool_)


def greater(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """input > other, as bool. As less otherwise."""
    return binary("greater", input, other, output, name, bool_)


def greater_equal(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """input >= other, as bool. As less otherwise."""
    return binary("greater_equal", input, other, output, name, bool_)


def equal(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """input == other, as bool; bool tensors too. As less otherwise."""
    return binary("equal", input, other, output, name, bool_)


def not_equal(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """input != other, as bool; bool tensors too. As less otherwise."""
    return binary("not_equal", input, other, output, name, bool_)


def logical_and(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """Both; bool tensors."""
    return binary("logical_and", input, other, output, name)


def logical_or(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """Either or both; bool tensors."""
    return binary("logical_or", input, other, output, name)


def logical_xor(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """One and not the other; bool tensors."""
    return binary("logical_xor", input, other, output, name)


def logical_not(input: Any, output: Any = NullTensor, name: str = "") -> Tensor:
    """The opposite; a bool tensor."""
    tensor = as_tensor(input)
    if tensor.ir.dtype != bool_:
        raise ModelError(
            f"logical_not needs bool, but the input is {tensor.ir.dtype.name}; compare it first"
        )
    return result("logical_not", [tensor], tensor.ir.shape, bool_, output, name=name)


def bitwise_and(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """Bits set in both; integers."""
    return binary("bitwise_and", input, other, output, name)


def bitwise_or(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """Bits set in either; integers."""
    return binary("bitwise_or", input, other, output, name)


def bitwise_xor(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """Bits set in one; integers."""
    return binary("bitwise_xor", input, other, output, name)


def bitwise_not(input: Any, output: Any = NullTensor, name: str = "") -> Tensor:
    """All bits inverted; integers."""
    tensor = as_tensor(input)
    if tensor.ir.dtype not in INTEGERS:
        raise ModelError(f"bitwise_not needs integers, but the input is {tensor.ir.dtype.name}")
    return unary("bitwise_not", tensor, output, name, integers=True)


def shift_left(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """input * 2^other; integers. Bits that leave are lost; by the type's width and more gives 0."""
    return binary("shift_left", input, other, output, name)


def shift_right(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """input / 2^other, rounded down; integers."""
    return binary("shift_right", input, other, output, name)


def maximum(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """The larger one; what is no number wins. Floating point or integers."""
    return binary("maximum", input, other, output, name, swapped="maximum")


def minimum(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """The smaller one; what is no number wins. Floating point or integers."""
    return binary("minimum", input, other, output, name, swapped="minimum")


def mod(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """Remainder with the sign of `other` (Python's %); of integers by 0 it is 0."""
    return binary("mod", input, other, output, name)


def fmod(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """Remainder with the sign of `input` (C's fmod); of integers by 0 it is 0."""
    return binary("fmod", input, other, output, name)


def atan2(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """The angle of the point (other, input) in radians, from -pi to pi; floating-point types."""
    return binary("atan2", input, other, output, name)


def hypot(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """sqrt(input^2 + other^2), without overflow between; floating-point types."""
    return binary("hypot", input, other, output, name, swapped="hypot")


def pow(input: Any, other: Any, output: Any = NullTensor, name: str = "") -> Any:
    """input to the power of other; floating point, or integers (a negative power gives 0, 1, -1).

    Powers 2, 3, 0.5 and -1 given as numbers are products, a root, a quotient.
    """
    if isinstance(other, Number) and not isinstance(input, Number):
        tensor = as_tensor(input)
        dtype = arithmetic("pow", tensor)
        short = _POWERS.get(float(other))
        if short is not None and (dtype not in INTEGERS or other in (2, 3)):
            attrs = {"expr": short}
            return result("pow", [tensor], tensor.ir.shape, dtype, output, attrs, name)
    return binary("pow", input, other, output, name)


_SQUARE: Tree = ["mul", leaf(0), leaf(0)]
_POWERS: dict[float, Tree] = {
    2.0: _SQUARE,
    3.0: ["mul", _SQUARE, leaf(0)],
    0.5: ["sqrt", leaf(0)],
    -1.0: ["reciprocal", leaf(0)],
}


def where(
    condition: Any, input: Any, other: Any, output: Any = NullTensor, name: str = ""
) -> Tensor:
    """input where the condition holds, else other; all three broadcast.

    condition: bool; input and other: tensors of one type, any but those of 4 bits, or one of them
    a number.
    """
    test = as_tensor(condition)
    if test.ir.dtype != bool_:
        raise ModelError(
            f"where: the condition is {test.ir.dtype.name}; expected bool, as comparisons make it"
        )
    sides = (input, other)
    if all(isinstance(s, Number) for s in sides):
        raise InvalidUsageError("where: two numbers have no type; pass ark.constant for one")
    tensors = [as_tensor(s) for s in sides if not isinstance(s, Number)]
    dtype = same_dtype("where", *tensors)
    if dtype.packed:
        raise ModelError(f"where of {dtype.name} is not built; ark.cast it")
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
    input: Any,
    minimum: float | None = None,
    maximum: float | None = None,
    output: Any = NullTensor,
    name: str = "",
) -> Tensor:
    """input, but not below `minimum` nor above `maximum`, numbers; floating point or integers."""
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
    """A tensor whose elements are their own index along `axis`; floating point or integers."""
    dims = check_dims("iota", shape)
    if not -len(dims) <= axis < len(dims):
        raise InvalidUsageError(f"iota: axis {axis} is out of range for {len(dims)} dimensions")
    attrs = {"expr": index(axis % len(dims) - len(dims)), "shape": dims}
    return result("iota", [], dims, dtype, NullTensor, attrs, name)


def _banded(what: str, input: Any, diagonal: int, lower: bool, output: Any, name: str) -> Tensor:
    tensor = as_tensor(input)
    if len(tensor.ir.shape) < 2 or tensor.ir.dtype.packed:
        raise ModelError(
            f"{what}: the input is {tensor.ir.dtype.name} {list(tensor.ir.shape)}; expected two "
            "dimensions or more, of a type of 8 bits or more"
        )
    distance = ["sub", index(-1), index(-2)]
    keep = ["less_equal" if lower else "greater_equal", distance, number(int(diagonal))]
    nothing: Tree = number(scalar(what, 0, tensor.ir.dtype))
    if tensor.ir.dtype == bool_:
        nothing = ["cast", "bool", nothing]
    attrs = {"expr": ["where", keep, leaf(0), nothing], "shape": tensor.ir.shape}
    return result(what, [tensor], tensor.ir.shape, tensor.ir.dtype, output, attrs, name)


def tril(input: Any, diagonal: int = 0, output: Any = NullTensor, name: str = "") -> Tensor:
    """The lower triangle of the last two dimensions, up to a diagonal (above 0: further up);
    zeros elsewhere. Types of 8 bits or more; ModelError for fewer than two dimensions.
    """
    return _banded("tril", input, diagonal, True, output, name)


def triu(input: Any, diagonal: int = 0, output: Any = NullTensor, name: str = "") -> Tensor:
    """The upper triangle of the last two dimensions, from a diagonal on (above 0: further up);
    zeros elsewhere. Types and errors as for tril.
    """
    return _banded("triu", input, diagonal, False, output, name)


def one_hot(
    input: Any,
    depth: int,
    dtype: DataType,
    axis: int = -1,
    off: float = 0,
    on: float = 1,
    name: str = "",
) -> Tensor:
    """`on` at each index of the input, `off` elsewhere, along a new dimension of size `depth`.

    input: any integers; a negative one counts from the end, others outside of the range have none.
    axis: where the new dimension stands in the result.
    """
    ids = as_tensor(input)
    if ids.ir.dtype not in INTEGERS:
        raise ModelError(f"one_hot: the input is {ids.ir.dtype.name}; expected integers")
    rank = len(ids.ir.shape) + 1
    if depth < 1 or not -rank <= axis < rank:
        raise InvalidUsageError(
            f"one_hot: depth {depth} along axis {axis} of {rank} dimensions; expected a depth of "
            "at least 1 and an axis of the result"
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


for _name in ("clip", "iota", "tril", "triu", "one_hot"):
    composed(_name)
