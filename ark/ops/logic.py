"""Elementwise comparisons, logic, selection, and arithmetic of two tensors beyond the basic four.

Comparisons return bool tensors. Logical ops take bool tensors and return them. Shapes broadcast as
in NumPy. Two tensors must have the same type, and one argument may be a number. ark.tasks.functions
defines the functions.
"""

from __future__ import annotations

from ark.errors import ModelError
from ark.frontend.tensor import Operand, Output, Tensor, TensorLike, as_tensor
from ark.ir.dtype import INTEGERS, bool_
from ark.ops.base import result
from ark.ops.elementwise import (
    Number,
    arithmetic,
    binary,
    composed,
)
from ark.tasks.expression import Tree, leaf


def less(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """input < other, as a bool tensor, with broadcasting; `other` may be a number.

    Both tensors have one type, floating point or integer. Raises ModelError if the shapes do not
    broadcast or the types differ.

    Examples:
        >>> ark.less(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 2.0, 2.0])).eval()
        tensor([ True, False, False])
    """
    return binary("less", input, other, output, name, bool_)


def less_equal(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """input <= other, as bool. Broadcasting, types and errors are as for `less`.

    Examples:
        >>> ark.less_equal(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 2.0, 2.0])).eval()
        tensor([ True,  True, False])
    """
    return binary("less_equal", input, other, output, name, bool_)


def greater(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """input > other, as bool. Broadcasting, types and errors are as for `less`.

    Examples:
        >>> ark.greater(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 2.0, 2.0])).eval()
        tensor([False, False,  True])
    """
    return binary("greater", input, other, output, name, bool_)


def greater_equal(
    input: TensorLike, other: Operand, output: Output = None, name: str = ""
) -> Tensor:
    """input >= other, as bool. Broadcasting, types and errors are as for `less`.

    Examples:
        >>> ark.greater_equal(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 2.0, 2.0])).eval()
        tensor([False,  True,  True])
    """
    return binary("greater_equal", input, other, output, name, bool_)


def equal(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """input == other, as bool. Bool tensors are also allowed; otherwise as for `less`.

    Examples:
        >>> ark.equal(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 2.0, 2.0])).eval()
        tensor([False,  True, False])
    """
    return binary("equal", input, other, output, name, bool_)


def not_equal(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """input != other, as bool. Bool tensors are also allowed; otherwise as for `less`.

    Examples:
        >>> ark.not_equal(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 2.0, 2.0])).eval()
        tensor([ True, False,  True])
    """
    return binary("not_equal", input, other, output, name, bool_)


def logical_and(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """True where both inputs are True. Inputs and result are bool tensors.

    Examples:
        >>> x, y = torch.tensor([True, True, False]), torch.tensor([True, False, False])
        >>> ark.logical_and(x, y).eval()
        tensor([ True, False, False])
    """
    return binary("logical_and", input, other, output, name)


def logical_or(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """True where at least one input is True. Inputs and result are bool tensors.

    Examples:
        >>> x, y = torch.tensor([True, True, False]), torch.tensor([True, False, False])
        >>> ark.logical_or(x, y).eval()
        tensor([ True,  True, False])
    """
    return binary("logical_or", input, other, output, name)


def logical_xor(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """True where exactly one input is True. Inputs and result are bool tensors.

    Examples:
        >>> x, y = torch.tensor([True, True, False]), torch.tensor([True, False, False])
        >>> ark.logical_xor(x, y).eval()
        tensor([False,  True, False])
    """
    return binary("logical_xor", input, other, output, name)


def logical_not(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """True where the input is False. Input and result are bool tensors.

    Raises ModelError for another type.

    Examples:
        >>> ark.logical_not(torch.tensor([True, False])).eval()
        tensor([False,  True])
    """
    tensor = as_tensor(input)
    if tensor.ir.dtype != bool_:
        raise ModelError(
            f"logical_not needs bool, but the input is {tensor.ir.dtype.name}; compare it first"
        )
    return result("logical_not", [tensor], tensor.ir.shape, bool_, output, name=name)


def maximum(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """The larger of input and other, elementwise; NaN if one is NaN. Types as for `less`.

    Examples:
        >>> ark.maximum(torch.tensor([5.0, -5.0, 2.0]), torch.tensor([3.0, 3.0, 2.0])).eval()
        tensor([5., 3., 2.])
    """
    return binary("maximum", input, other, output, name, swapped="maximum")


def minimum(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """The smaller of input and other, elementwise; NaN if one is NaN. Types as for `less`.

    Examples:
        >>> ark.minimum(torch.tensor([5.0, -5.0, 2.0]), torch.tensor([3.0, 3.0, 2.0])).eval()
        tensor([ 3., -5.,  2.])
    """
    return binary("minimum", input, other, output, name, swapped="minimum")


def mod(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """The remainder of input / other with the sign of `other` (Python's %).

    For integers it is 0 if other is 0.

    Examples:
        >>> ark.mod(torch.tensor([5.0, -5.0, 2.0]), torch.tensor([3.0, 3.0, 2.0])).eval()
        tensor([2., 1., 0.])
    """
    return binary("mod", input, other, output, name)


def fmod(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """The remainder of input / other with the sign of `input` (C's fmod).

    For integers it is 0 if other is 0.

    Examples:
        >>> ark.fmod(torch.tensor([5.0, -5.0, 2.0]), torch.tensor([3.0, 3.0, 2.0])).eval()
        tensor([ 2., -2.,  0.])
    """
    return binary("fmod", input, other, output, name)


def atan2(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """The angle of the point (other, input) in radians, from -pi to pi; floating-point types.

    Examples:
        >>> ark.atan2(torch.tensor([5.0, -5.0, 2.0]), torch.tensor([3.0, 3.0, 2.0])).eval()
        tensor([ 1.0304, -1.0304,  0.7854])
    """
    return binary("atan2", input, other, output, name)


def hypot(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """sqrt(input^2 + other^2), without intermediate overflow; floating-point types.

    Examples:
        >>> ark.hypot(torch.tensor([5.0, -5.0, 2.0]), torch.tensor([3.0, 3.0, 2.0])).eval()
        tensor([5.8310, 5.8310, 2.8284])
    """
    return binary("hypot", input, other, output, name, swapped="hypot")


def pow(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """input^other, elementwise, for floating point or integers.

    Integers to a negative power are rounded towards zero, so they give 0, 1 or -1. If `other` is
    the number 2, 3, 0.5 or -1, the power is computed by multiplications, a square root or a
    reciprocal.

    Examples:
        >>> ark.pow(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 2.0, 0.5])).eval()
        tensor([1.0000, 4.0000, 1.7321])
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


for _name in ("clip", "iota", "tril", "triu", "one_hot"):
    composed(_name)
