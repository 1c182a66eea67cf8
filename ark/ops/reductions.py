"""Reductions over axes: reduce_sum, reduce_mean, reduce_max, reduce_min, reduce_prod.

Floating-point sums are accumulated in fp32, also for fp16 and bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.attributes import ReduceAttributes
from ark.ir.dtype import FLOATS, INTEGERS, DataType, fp32
from ark.ir.values import MAX_DIM_ELEMENTS
from ark.lower.ops.reductions import lower_reduce
from ark.lower.registry import register
from ark.ops.base import float_dtype, positive_axis, result
from ark.ops.elementwise import copy
from ark.ops.views import reshape
from ark.tasks import expression

FUNCTIONS = ("sum", "mean", "max", "min", "prod")


def _reduced(inputs: Sequence[np.ndarray], given: ReduceAttributes) -> np.ndarray:
    """What a reduction reduces: its input, or its term of all inputs."""
    if given.term is None:
        return inputs[0]
    shape = np.broadcast_shapes(*(array.shape for array in inputs))
    return np.broadcast_to(expression.evaluate(given.term, inputs, shape), shape)


def _reduce_reference(function: str) -> Any:
    apply: Any = getattr(np, function)

    def run(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
        given = ReduceAttributes.from_node(attrs)
        return [apply(_reduced(inputs, given), axis=given.axis, keepdims=given.keepdims)]

    return run


for _function in FUNCTIONS:
    register(f"reduce_{_function}", _reduce_reference(_function), lower_reduce, aliasing="none")


def _squares_reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    given = ReduceAttributes.from_node(attrs)
    x = _reduced(inputs, given)
    centred = x - x.mean(axis=given.axis, keepdims=True)
    return [(centred * centred).sum(axis=given.axis, keepdims=given.keepdims)]


register("reduce_squares", _squares_reference, lower_reduce, aliasing="none")


def _moments_reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of reduce_moments, which only the compiler creates: means, and sums of
    squared differences from them.
    """
    given = ReduceAttributes.from_node(attrs)
    mean = inputs[0].mean(axis=given.axis, keepdims=given.keepdims)
    return [mean, *_squares_reference(inputs, attrs)]


register("reduce_moments", _moments_reference, lower_reduce, aliasing="none")


def _sums_reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of reduce_sums, which only the compiler creates: the sums of the first
    input's elements, and of the terms.
    """
    given = ReduceAttributes.from_node(attrs)
    reduced = (inputs[0], _reduced(inputs, given))
    return [np.sum(values, axis=given.axis, keepdims=given.keepdims) for values in reduced]


register("reduce_sums", _sums_reference, lower_reduce, aliasing="none")


def _logsumexp_reference(
    inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]
) -> list[np.ndarray]:
    """The NumPy reference of reduce_logsumexp, which only the compiler creates: what log_softmax
    subtracts from each element.
    """
    given = ReduceAttributes.from_node(attrs)
    x = _reduced(inputs, given)
    summed: Any = np.logaddexp.reduce
    total = summed(x, axis=given.axis, keepdims=given.keepdims)
    return [np.where(total == np.inf, np.nan, total)]


register("reduce_logsumexp", _logsumexp_reference, lower_reduce, aliasing="none")


def reduce_by(
    function: str,
    input: Any,
    axis: int | Sequence[int],
    keepdims: bool,
    output: Any,
    name: str,
) -> Tensor:
    """Adds a reduction over one axis or several and returns its result. function: one of
    FUNCTIONS.
    """
    tensor = as_tensor(input)
    op = f"reduce_{function}"
    dtype = tensor.ir.dtype
    if dtype not in INTEGERS or function == "mean":
        float_dtype(op, tensor)
    if isinstance(axis, Iterable) and not isinstance(axis, str):
        return _reduce_axes(function, tensor, axis, keepdims, output, name)
    return reduce_axis(function, tensor, axis, keepdims, output, name, dtype)


def reduce_axis(
    function: str,
    tensor: Tensor,
    axis: int,
    keepdims: bool,
    output: Any,
    name: str,
    dtype: DataType,
) -> Tensor:
    """Adds a reduction over one axis, with a result of type `dtype`."""
    op = f"reduce_{function}"
    axis = positive_axis(op, axis, len(tensor.ir.shape))
    shape = list(tensor.ir.shape)
    shape[axis] = 1
    if not keepdims:
        del shape[axis]
    named = {"function": function, "axis": axis, "keepdims": bool(keepdims)}
    attrs = ReduceAttributes.from_node(named).to_node()
    return result(op, [tensor], shape or [1], dtype, output, attrs, name)


def _reduce_axes(
    function: str, tensor: Tensor, axes: Sequence[int], keepdims: bool, output: Any, name: str
) -> Tensor:
    """Adds a reduction over several axes. Neighbouring axes are merged into one dimension; the
    remaining axes are reduced one after another, with intermediate results in fp32.
    """
    shape, dtype = tensor.ir.shape, tensor.ir.dtype
    op = f"reduce_{function}"
    wanted = sorted({positive_axis(op, a, len(shape)) for a in axes})
    if not wanted:
        return copy(tensor, output, name)
    kept = [n for d, n in enumerate(shape) if d not in wanted]
    full = [1 if d in wanted else n for d, n in enumerate(shape)]
    groups: list[list[int]] = []
    for a in wanted:
        follows = bool(groups) and groups[-1][-1] == a - 1
        if follows and math.prod(shape[groups[-1][0] : a + 1]) <= MAX_DIM_ELEMENTS:
            groups[-1].append(a)
        else:
            groups.append([a])
    reduced = tensor
    for group in reversed(groups):
        dims = reduced.shape()
        joined = math.prod(dims[group[0] : group[-1] + 1])
        flat = reshape(reduced, [*dims[: group[0]], joined, *dims[group[-1] + 1 :]])
        alone = len(groups) == 1 and output is None
        label = name if alone else ""
        wide = fp32 if dtype in FLOATS and group is not groups[0] else dtype
        part = reduce_axis(function, flat, group[0], True, None, label, wide)
        reduced = reshape(part, [*dims[: group[0]], *[1] * len(group), *dims[group[-1] + 1 :]])
    reduced = reshape(reduced, full if keepdims else kept or [1])
    return reduced if output is None else copy(reduced, output, name)


def squared_differences(tensor: Tensor, axes: Sequence[int]) -> Tensor | None:
    """The sum of squared differences from the mean over neighbouring axes, which have size 1 in the
    result. An fp32 tensor is read only once. None if the axes are not neighbours.
    """
    shape, first, end = tensor.shape(), min(axes), max(axes) + 1
    joined = math.prod(shape[first:end])
    if end - first != len(axes) or not 1 < joined <= MAX_DIM_ELEMENTS:
        return None
    alone = len(axes) == 1
    flat = tensor if alone else reshape(tensor, [*shape[:first], joined, *shape[end:]])
    squares = reduce_axis("squares", flat, first, True, None, "", tensor.ir.dtype)
    return squares if alone else reshape(squares, [*shape[:first], *[1] * len(axes), *shape[end:]])


def reduce_sum(
    input: TensorLike,
    axis: int | Sequence[int],
    keepdims: bool = True,
    output: Output = None,
    name: str = "",
) -> Tensor:
    """The sum over an axis or several; fp32, fp16, bf16, or integers, which wrap.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.reduce_sum(x, axis=1).eval()
        tensor([[ 3.],
                [12.]])
    """
    return reduce_by("sum", input, axis, keepdims, output, name)


def reduce_mean(
    input: TensorLike,
    axis: int | Sequence[int],
    keepdims: bool = True,
    output: Output = None,
    name: str = "",
) -> Tensor:
    """The mean over an axis or several; fp32, fp16, bf16.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.reduce_mean(x, axis=1).eval()
        tensor([[1.],
                [4.]])

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.mean(x, 1).eval()
        tensor([[1.],
                [4.]])
    """
    return reduce_by("mean", input, axis, keepdims, output, name)


def reduce_max(
    input: TensorLike,
    axis: int | Sequence[int],
    keepdims: bool = True,
    output: Output = None,
    name: str = "",
) -> Tensor:
    """The largest element over an axis or several; fp32, fp16, bf16, integers.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.reduce_max(x, axis=[0, 1]).eval()
        tensor([[5.]])
    """
    return reduce_by("max", input, axis, keepdims, output, name)


def reduce_min(
    input: TensorLike,
    axis: int | Sequence[int],
    keepdims: bool = True,
    output: Output = None,
    name: str = "",
) -> Tensor:
    """The smallest element over an axis or several; fp32, fp16, bf16, integers.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.reduce_min(x, axis=1, keepdims=False).eval()
        tensor([0., 3.])
    """
    return reduce_by("min", input, axis, keepdims, output, name)


def reduce_prod(
    input: TensorLike,
    axis: int | Sequence[int],
    keepdims: bool = True,
    output: Output = None,
    name: str = "",
) -> Tensor:
    """The product over an axis or several; fp32, fp16, bf16, or integers, which wrap.

    Examples:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> ark.reduce_prod(x, axis=0).eval()
        tensor([[ 0.,  4., 10.]])
    """
    return reduce_by("prod", input, axis, keepdims, output, name)


mean = reduce_mean
