"""Quantisation by groups: neighbouring elements of a row share a scale and optionally a zero point.

value = scale * (element - zero). Groups are along the last dimension of a weight (outputs, inputs),
as in GPTQ's and AWQ's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.errors import ModelError
from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.attributes import GroupAttributes
from ark.ir.dtype import PACKED, SMALL_FLOATS, DataType, fp32, int4, int8, uint8
from ark.lower.ops.quantize import lower_quantized_linear, lower_row_values
from ark.lower.registry import register
from ark.ops.base import float_dtype, result
from ark.ops.elementwise import cast, composed, div
from ark.ops.linear_algebra import linear
from ark.ops.logic import maximum
from ark.ops.math import abs as magnitude
from ark.ops.math import round as nearest
from ark.ops.reductions import reduce_max
from ark.ops.selection import clip
from ark.ops.views import reshape
from ark.tasks.expression import Tree, leaf
from ark.tasks.quantized_linear import ELEMENTS_PER_LANE, MAX_ROWS

TYPES = (*PACKED, int8, uint8, *SMALL_FLOATS)


def _groups(op: str, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> int:
    """The number of elements of a group, which follows from the shapes of weight and scales. Raises
    ModelError if the types or shapes do not fit each other.
    """
    float_dtype(op, scales)
    shape, given = weight.ir.shape, scales.ir.shape
    fits = len(given) == len(shape) and given[:-1] == shape[:-1] and shape[-1] % given[-1] == 0
    if weight.ir.dtype not in TYPES or not fits or (zeros and zeros.ir.shape != given):
        raise ModelError(
            f"{op}: a weight of {weight.ir.dtype.name} {list(shape)} with scales of shape "
            f"{list(given)}{f', zeros {list(zeros.ir.shape)}' if zeros else ''}; expected one of "
            f"{', '.join(t.name for t in TYPES)}, and one scale for every group of a row"
        )
    return shape[-1] // given[-1]


def dequantize(
    weight: TensorLike,
    scales: TensorLike,
    zeros: TensorLike | None = None,
    dtype: DataType = fp32,
    output: Output = None,
    name: str = "",
) -> Tensor:
    """Computes scale * (element - zero) for every element of a quantised weight.

    weight: (..., k) of int4, uint4, fp4, int8, uint8 or fp8. scales: (..., k / group), floating
    point, where `group` is the even number of elements that share a scale. zeros: the scales'
    shape, floating point, by default 0. The result has the weight's shape and the type `dtype`:
    fp32, fp16 or bf16. Raises ModelError for other types or shapes.

    Examples:
        >>> weight = torch.tensor([[2, -4]], dtype=torch.int8)
        >>> ark.dequantize(weight, torch.tensor([[0.5]])).eval()
        tensor([[ 1., -2.]])
    """
    w, s = as_tensor(weight), as_tensor(scales)
    z = None if zeros is None else as_tensor(zeros)
    group = _groups("dequantize", w, s, z)
    shape, many = w.ir.shape, s.ir.shape[-1]
    parts = [reshape(w, [*shape[:-1], many, group])]
    parts += [reshape(t, [*shape[:-1], many, 1]) for t in (s, z) if t is not None]
    value: Tree = leaf(0) if z is None else ["sub", leaf(0), leaf(2)]
    attrs = {"expr": ["mul", value, leaf(1)]}
    wide = (*shape[:-1], many, group)
    values = result("dequantize", parts, wide, dtype, None, attrs, name)
    flat = reshape(values, shape)
    if output is None:
        return flat
    return cast(flat, dtype, output)


def quantize(
    input: TensorLike, group: int, dtype: DataType = int4, name: str = ""
) -> tuple[Tensor, Tensor]:
    """Quantises groups of `group` neighbouring elements; returns (elements, scales).

    The scale of a group maps its largest magnitude to the largest value of `dtype`: int4, int8 or
    fp4. Elements are rounded to nearest even; scales have the input's type. Raises ModelError for
    another type, or if `group` does not divide the last dimension.

    Examples:
        >>> elements, scales = ark.quantize(torch.tensor([[7.0, -3.5, 1.0, 0.0]]), group=4)
        >>> scales.eval()
        tensor([[1.]])
    """
    most = {"int4": 7.0, "int8": 127.0, "fp4": 6.0}.get(dtype.name)
    x = as_tensor(input)
    float_dtype("quantize", x)
    shape = x.ir.shape
    if most is None or group < 1 or shape[-1] % group:
        raise ModelError(
            f"quantize: the input has shape {list(shape)}, the type is {dtype.name} and the group "
            f"{group}; expected int4, int8 or fp4, and a group that divides the last dimension"
        )
    wide = reshape(x, [*shape[:-1], shape[-1] // group, group])
    scales = div(maximum(reduce_max(magnitude(wide), -1), 1e-30), most)
    values = div(wide, scales)
    if dtype.name != "fp4":
        values = clip(nearest(values), -most, most)
    codes = cast(reshape(values, shape), dtype, name=name or "quantize")
    return codes, reshape(scales, [*shape[:-1], shape[-1] // group])


def quantized_linear(
    input: TensorLike,
    weight: TensorLike,
    scales: TensorLike,
    zeros: TensorLike | None = None,
    output: Output = None,
    name: str = "",
    dtype: DataType | None = None,
) -> Tensor:
    """input @ dequantize(weight, scales, zeros)^T, accumulated in fp32.

    input: (rows, k); weight: (n, k); scales and zeros: as for dequantize. The result is (rows, n),
    of the input's type. For up to eight rows the quantised weight is multiplied without storing
    dequantised elements. For more rows the weight is dequantised first, to the type `dtype`, by
    default the input's. Raises ModelError for shapes or types that do not fit.

    Examples:
        >>> weight = torch.tensor([[2, -4]], dtype=torch.int8)
        >>> ark.quantized_linear(torch.ones(1, 2), weight, torch.tensor([[0.5]])).eval()
        tensor([[-1.]])
    """
    x, w, s = as_tensor(input), as_tensor(weight), as_tensor(scales)
    z = None if zeros is None else as_tensor(zeros)
    own = float_dtype("quantized_linear", x)
    group = _groups("quantized_linear", w, s, z)
    left, right = x.ir.shape, w.ir.shape
    if len(left) != 2 or len(right) != 2 or left[1] != right[1]:
        raise ModelError(
            f"quantized_linear: the input has shape {list(left)} and the weight {list(right)}; "
            "expected (rows, k) and (n, k)"
        )
    plain = all(t.ir.dense for t in (w, s, *([z] if z else [])))
    if left[0] > MAX_ROWS or group % ELEMENTS_PER_LANE or not plain:
        full = dequantize(w, s, z, dtype or own)
        return linear(x, full, output, name=name or "quantized_linear")
    inputs = [x, w, s, *([z] if z else [])]
    attrs = GroupAttributes(group=group).to_node()
    return result("quantized_linear", inputs, (left[0], right[0]), own, output, attrs, name)


def _values(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of row_values. It returns its input, because references get weights of a
    RowType already dequantised.
    """
    return [inputs[0]]


def _quantized(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    if len(inputs) == 2:  # a weight of a RowType, which references get already dequantised
        return [inputs[0] @ inputs[1].T]
    x, weight, scales, *zeros = inputs
    group = GroupAttributes.from_node(attrs).group
    value = weight - np.repeat(zeros[0], group, -1) if zeros else weight
    return [x @ (value * np.repeat(scales, group, -1)).T]


composed("dequantize")
register("quantized_linear", _quantized, lower_quantized_linear, aliasing="none")
register("row_values", _values, lower_row_values, aliasing="none")
