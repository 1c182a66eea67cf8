"""Running sums, running products and linear recurrences along a dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.attributes import ScanAttributes
from ark.lower.ops.scans import lower_scan
from ark.lower.registry import register
from ark.ops.base import positive_axis, result
from ark.ops.elementwise import arithmetic
from ark.tasks.along import lines


def cumsum(
    input: TensorLike,
    axis: int,
    exclusive: bool = False,
    reverse: bool = False,
    output: Output = None,
    name: str = "",
) -> Tensor:
    """Running sums: result[i] is the sum of the elements 0 to i along `axis`.

    exclusive: if True, the sum of the elements before i. reverse: if True, the running sum starts
    at the last element. fp32, fp16, bf16, which are accumulated in fp32, or integers.

    Examples:
        >>> ark.cumsum(torch.arange(4.0), axis=0).eval()
        tensor([0., 1., 3., 6.])
    """
    return _scan("add", input, axis, exclusive, reverse, output, name)


def cumprod(
    input: TensorLike,
    axis: int,
    exclusive: bool = False,
    reverse: bool = False,
    output: Output = None,
    name: str = "",
) -> Tensor:
    """Running products: result[i] is the product of the elements 0 to i along `axis`.

    Otherwise as cumsum.

    Examples:
        >>> ark.cumprod(torch.tensor([1.0, 2.0, 3.0]), axis=0).eval()
        tensor([1., 2., 6.])
    """
    return _scan("mul", input, axis, exclusive, reverse, output, name)


def sums_from(tensor: Tensor, axis: int, start: Tensor) -> Tensor:
    """Running sums along `axis` that begin with the value `start` instead of 0. `start` has size 1
    along the axis. Its type is fp32 if the tensor is floating point, otherwise the tensor's type.
    """
    attrs = ScanAttributes(axis=axis, function="add", exclusive=False, reverse=False).to_node()
    return result("scan", [tensor, start], tensor.ir.shape, tensor.ir.dtype, None, attrs)


def recurrence(factors: Tensor, terms: Tensor, axis: int) -> Tensor:
    """The linear recurrence h[i] = factors[i] * h[i - 1] + terms[i] along `axis`, where h[-1] is 0.
    Both tensors have one shape, and the type fp32, fp16 or bf16. Values are accumulated in fp32.
    """
    attrs = ScanAttributes(axis=axis, function="linear", exclusive=False, reverse=False).to_node()
    shape, dtype = terms.ir.shape, terms.ir.dtype
    return result("scan", [factors, terms], shape, dtype, None, attrs)


def _scan(
    function: Literal["add", "mul"],
    input: TensorLike,
    axis: int,
    exclusive: bool,
    reverse: bool,
    output: TensorLike | None,
    name: str,
) -> Tensor:
    tensor = as_tensor(input)
    dtype = arithmetic("cumsum", tensor)
    shape = tensor.ir.shape
    axis = positive_axis("cumsum", axis, len(shape))
    attrs = ScanAttributes(
        axis=axis, function=function, exclusive=bool(exclusive), reverse=bool(reverse)
    )
    return result("scan", [tensor], shape, dtype, output, attrs.to_node(), name)


def _scan_reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    given = ScanAttributes.from_node(attrs)
    axis = given.axis
    if given.function == "linear":
        return [_recurrence_reference(inputs[0], inputs[1], axis)]
    x = np.flip(inputs[0], axis) if given.reverse else inputs[0]
    apply, start = (np.cumprod, 1) if given.function == "mul" else (np.cumsum, 0)
    if given.exclusive:
        first = np.full(lines(x.shape, axis), start, x.dtype)
        x = np.concatenate([first, np.delete(x, -1, axis)], axis)
    if len(inputs) > 1:
        x = np.concatenate([inputs[1], x], axis)
    sums = apply(x, axis)
    if len(inputs) > 1:
        sums = np.delete(sums, 0, axis)
    return [np.flip(sums, axis) if given.reverse else sums]


def _recurrence_reference(factors: np.ndarray, terms: np.ndarray, axis: int) -> np.ndarray:
    total = np.zeros(lines(terms.shape, axis), np.float32).squeeze(axis)
    values = []
    steps = (np.moveaxis(operand, axis, 0) for operand in (factors, terms))
    for factor, term in zip(*steps, strict=True):
        total = np.asarray(factor * total + term, np.float32)
        values.append(total)
    return np.stack(values, axis).astype(terms.dtype)


register("scan", _scan_reference, lower_scan, aliasing="none")
