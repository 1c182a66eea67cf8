"""Bitwise ops and shifts of integers, elementwise with broadcasting."""

from __future__ import annotations

from ark.errors import ModelError
from ark.frontend.tensor import Operand, Output, Tensor, TensorLike, as_tensor
from ark.ir.dtype import INTEGERS
from ark.ops.elementwise import (
    binary,
    unary,
)


def bitwise_and(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """Bitwise input & other, with broadcasting. Both are integers of one type.

    Examples:
        >>> x = torch.tensor([1, 6, 12], dtype=torch.int32)
        >>> y = torch.tensor([1, 2, 2], dtype=torch.int32)
        >>> ark.bitwise_and(x, y).eval()
        tensor([1, 2, 0], dtype=torch.int32)
    """
    return binary("bitwise_and", input, other, output, name)


def bitwise_or(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """Bitwise input | other, with broadcasting. Both are integers of one type.

    Examples:
        >>> x = torch.tensor([1, 6, 12], dtype=torch.int32)
        >>> y = torch.tensor([1, 2, 2], dtype=torch.int32)
        >>> ark.bitwise_or(x, y).eval()
        tensor([ 1,  6, 14], dtype=torch.int32)
    """
    return binary("bitwise_or", input, other, output, name)


def bitwise_xor(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """Bitwise input ^ other (exclusive or), with broadcasting. Both are integers of one type.

    Examples:
        >>> x = torch.tensor([1, 6, 12], dtype=torch.int32)
        >>> y = torch.tensor([1, 2, 2], dtype=torch.int32)
        >>> ark.bitwise_xor(x, y).eval()
        tensor([ 0,  4, 14], dtype=torch.int32)
    """
    return binary("bitwise_xor", input, other, output, name)


def bitwise_not(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """Bitwise ~input: inverts every bit of each element. The input has an integer type.

    Raises ModelError for another type.

    Examples:
        >>> ark.bitwise_not(torch.tensor([0, 5, -1], dtype=torch.int32)).eval()
        tensor([-1, -6,  0], dtype=torch.int32)
    """
    tensor = as_tensor(input)
    if tensor.ir.dtype not in INTEGERS:
        raise ModelError(f"bitwise_not needs integers, but the input is {tensor.ir.dtype.name}")
    return unary("bitwise_not", tensor, output, name, integers=True)


def shift_left(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """input << other, which is input * 2^other, with broadcasting. Both are integers of one type.

    Bits shifted out are lost. A shift by the type's number of bits or more gives 0.

    Examples:
        >>> x = torch.tensor([1, 6, 12], dtype=torch.int32)
        >>> y = torch.tensor([1, 2, 2], dtype=torch.int32)
        >>> ark.shift_left(x, y).eval()
        tensor([ 2, 24, 48], dtype=torch.int32)
    """
    return binary("shift_left", input, other, output, name)


def shift_right(input: TensorLike, other: Operand, output: Output = None, name: str = "") -> Tensor:
    """input >> other, which is input / 2^other rounded down. Both are integers of one type.

    Examples:
        >>> x = torch.tensor([1, 6, 12], dtype=torch.int32)
        >>> y = torch.tensor([1, 2, 2], dtype=torch.int32)
        >>> ark.shift_right(x, y).eval()
        tensor([0, 1, 3], dtype=torch.int32)
    """
    return binary("shift_right", input, other, output, name)
