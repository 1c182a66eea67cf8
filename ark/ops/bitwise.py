"""Bitwise ops and shifts of integers, elementwise with broadcasting."""

from __future__ import annotations

from ark.errors import ModelError
from ark.frontend.tensor import NullTensor, Tensor, TensorLike, as_tensor
from ark.ir.dtype import INTEGERS
from ark.ops.elementwise import (
    binary,
    unary,
)


def bitwise_and(
    input: TensorLike,
    other: TensorLike | float,
    output: TensorLike | None = NullTensor,
    name: str = "",
) -> Tensor:
    """Bits set in both; integers.

    Examples:
        >>> x = torch.tensor([1, 6, 12], dtype=torch.int32)
        >>> y = torch.tensor([1, 2, 2], dtype=torch.int32)
        >>> ark.bitwise_and(x, y).eval()
        tensor([1, 2, 0], dtype=torch.int32)
    """
    return binary("bitwise_and", input, other, output, name)


def bitwise_or(
    input: TensorLike,
    other: TensorLike | float,
    output: TensorLike | None = NullTensor,
    name: str = "",
) -> Tensor:
    """Bits set in either; integers.

    Examples:
        >>> x = torch.tensor([1, 6, 12], dtype=torch.int32)
        >>> y = torch.tensor([1, 2, 2], dtype=torch.int32)
        >>> ark.bitwise_or(x, y).eval()
        tensor([ 1,  6, 14], dtype=torch.int32)
    """
    return binary("bitwise_or", input, other, output, name)


def bitwise_xor(
    input: TensorLike,
    other: TensorLike | float,
    output: TensorLike | None = NullTensor,
    name: str = "",
) -> Tensor:
    """Bits set in one; integers.

    Examples:
        >>> x = torch.tensor([1, 6, 12], dtype=torch.int32)
        >>> y = torch.tensor([1, 2, 2], dtype=torch.int32)
        >>> ark.bitwise_xor(x, y).eval()
        tensor([ 0,  4, 14], dtype=torch.int32)
    """
    return binary("bitwise_xor", input, other, output, name)


def bitwise_not(
    input: TensorLike, output: TensorLike | None = NullTensor, name: str = ""
) -> Tensor:
    """All bits inverted; integers.

    Examples:
        >>> ark.bitwise_not(torch.tensor([0, 5, -1], dtype=torch.int32)).eval()
        tensor([-1, -6,  0], dtype=torch.int32)
    """
    tensor = as_tensor(input)
    if tensor.ir.dtype not in INTEGERS:
        raise ModelError(f"bitwise_not needs integers, but the input is {tensor.ir.dtype.name}")
    return unary("bitwise_not", tensor, output, name, integers=True)


def shift_left(
    input: TensorLike,
    other: TensorLike | float,
    output: TensorLike | None = NullTensor,
    name: str = "",
) -> Tensor:
    """input * 2^other; integers.

    Bits shifted out are lost; shifts of the type's width or more give 0.

    Examples:
        >>> x = torch.tensor([1, 6, 12], dtype=torch.int32)
        >>> y = torch.tensor([1, 2, 2], dtype=torch.int32)
        >>> ark.shift_left(x, y).eval()
        tensor([ 2, 24, 48], dtype=torch.int32)
    """
    return binary("shift_left", input, other, output, name)


def shift_right(
    input: TensorLike,
    other: TensorLike | float,
    output: TensorLike | None = NullTensor,
    name: str = "",
) -> Tensor:
    """input / 2^other, rounded down; integers.

    Examples:
        >>> x = torch.tensor([1, 6, 12], dtype=torch.int32)
        >>> y = torch.tensor([1, 2, 2], dtype=torch.int32)
        >>> ark.shift_right(x, y).eval()
        tensor([0, 1, 3], dtype=torch.int32)
    """
    return binary("shift_right", input, other, output, name)
