"""Converts ONNX's operators on quantised values, which are computed in fp32, and products of
integers, whose sums are exact.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx

import ark
from ark.interop.onnx import carried
from ark.interop.onnx.products import convolved, multiplied
from ark.interop.onnx.values import (
    Call,
    Value,
    axis_of,
    data_type,
    kind_of,
    operator,
    refuse,
    shaped,
)

_BITS8 = (np.dtype(np.int8), np.dtype(np.uint8))
MAX_EXACT_PRODUCTS = 256  # products of two 9-bit integers that fp32 adds without rounding


def _along(call: Call, place: int, shape: tuple[int, ...]) -> Any:
    """A scale or zero point, input number `place`, in fp32 and in a shape that broadcasts to
    `shape`. It has one value, or one value for each element or each block of elements along an
    axis.
    """
    tensor, own = ark.cast(call.tensor(place), ark.fp32), call.shape(place)
    size = call.attribute("block_size", 0)
    if len(own) == 0 or (own == (1,) and not size):
        return tensor
    axis = axis_of(call.attribute("axis", 1), len(shape))
    if size and len(own) == len(shape):
        wide = [*own[: axis + 1], size, *own[axis + 1 :]]
        tensor = ark.expand(ark.reshape(tensor, [*own[: axis + 1], 1, *own[axis + 1 :]]), wide)
        tensor = ark.reshape(tensor, [*own[:axis], own[axis] * size, *own[axis + 1 :]])
        return tensor if own[axis] * size == shape[axis] else _leading(tensor, axis, shape[axis])
    return ark.reshape(tensor, [-1 if d == axis else 1 for d in range(len(shape))])


def _leading(tensor: Any, axis: int, size: int) -> Any:
    return tensor[tuple([slice(None)] * axis + [slice(0, size)])]


def _rounded(steps: Any, zero: Any, dtype: Any, saturate: bool = True) -> Any:
    """Quantises values that were divided by their scale (`steps`). For an integer type the result
    is round(steps) + zero, with ties to even, clamped to the type's range. For a float type: steps
    + zero, rounded to the type.
    """
    if dtype.kind == "f" or dtype not in (*_BITS8, *carried.INTEGERS):
        steps = steps if zero is None else ark.add(steps, zero)
        return carried.to_float(steps, dtype, saturate)
    limits = ml_dtypes.iinfo(dtype)
    steps = ark.round(steps)
    steps = ark.add(steps, zero) if zero is not None else steps
    steps = ark.minimum(ark.maximum(steps, float(limits.min)), float(limits.max))
    return ark.cast(steps, data_type(dtype))


def _result(tensor: Any, shape: tuple[int, ...], dtype: Any) -> Value:
    value = shaped(tensor, shape)
    value.kind = kind_of(dtype)
    return value


def _types(call: Call, place: int, default: Any) -> Any:
    """The NumPy type of a result: the attribute `output_dtype`, otherwise the type of input
    `place`, otherwise `default`.
    """
    wanted = call.attribute("output_dtype", 0)
    if wanted:
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(wanted))
    return np.dtype(call.value(place).dtype) if call.has(place) else np.dtype(default)


@operator("QuantizeLinear")
def _quantize(call: Call) -> Value:
    shape = call.shape(0)
    steps = ark.div(ark.cast(call.tensor(0), ark.fp32), _along(call, 1, shape))
    precision = call.attribute("precision", 0)
    if precision:
        short = data_type(onnx.helper.tensor_dtype_to_np_dtype(precision))
        steps = ark.cast(ark.cast(steps, short), ark.fp32)
    zero = _along(call, 2, shape) if call.has(2) else None
    dtype = _types(call, 2, np.uint8)
    saturate = bool(call.attribute("saturate", 1))
    return _result(_rounded(steps, zero, dtype, saturate), shape, dtype)


@operator("DequantizeLinear")
def _dequantize(call: Call) -> Value:
    shape = call.shape(0)
    value = ark.cast(call.tensor(0), ark.fp32)
    if call.has(2):
        value = ark.sub(value, _along(call, 2, shape))
    value = ark.mul(value, _along(call, 1, shape))
    dtype = data_type(_types(call, 1, np.float32))
    return shaped(value if dtype == ark.fp32 else ark.cast(value, dtype), shape)


def _centred(call: Call, place: int, zero: int, axis: int | None) -> Any:
    """8-bit integers minus their zero point, in fp32. axis: the axis of the input to which a vector
    of zero points belongs.
    """
    tensor = ark.cast(call.tensor(place), ark.fp32)
    if not call.has(zero):
        return tensor
    shape, rank = call.shape(zero), len(call.shape(place))
    point = ark.cast(call.tensor(zero), ark.fp32)
    if axis is not None and len(shape) == 1 and shape != (1,):
        point = ark.reshape(point, [-1 if d == axis % rank else 1 for d in range(rank)])
    return ark.sub(tensor, point)


def _in_parts(product: Any, length: int, each: int) -> Any:
    """Computes an exact int32 product as a sum of partial products, each of which is exact in fp32.
    product: a function that returns the partial product over a range of the summed dimension.
    length: the size of the summed dimension. each: the largest size of a range.
    """
    total = None
    for at in range(0, length, each):
        part = ark.cast(product(at, min(at + each, length)), ark.int32)
        total = part if total is None else ark.add(total, part)
    return total


def _products(a: Any, b: Any) -> Any:
    def part(low: int, high: int) -> Any:
        left, right = a.ir.shape, b.ir.shape
        if high - low == left[-1]:
            return multiplied(a, b)
        here, along = slice(low, high), max(len(right) - 2, 0)
        x = a[tuple([slice(None)] * (len(left) - 1) + [here])]
        return multiplied(x, b[tuple([slice(None)] * along + [here])])

    return _in_parts(part, a.ir.shape[-1], MAX_EXACT_PRODUCTS)


def _convolutions(call: Call, x: Any, w: Any) -> Any:
    """A convolution of integers. The channels of a group are summed in parts that are small enough
    to be exact in fp32.
    """
    groups, (_, inner, *window) = call.attribute("group", 1), w.ir.shape
    each = int(max(1, MAX_EXACT_PRODUCTS // int(np.prod(window))))
    if inner <= each and int(np.prod(window)) <= MAX_EXACT_PRODUCTS:
        return ark.cast(convolved(call, x, w, None), ark.int32)
    if groups > 1 or int(np.prod(window)) > MAX_EXACT_PRODUCTS:
        raise refuse(f"a convolution of integers of {inner} channels in {groups} groups")

    def part(low: int, high: int) -> Any:
        return convolved(call, x[:, low:high], w[:, low:high], None)

    return _in_parts(part, inner, each)


@operator("MatMulInteger")
def _matmul_integer(call: Call) -> Value:
    a = _centred(call, 0, 2, -2 if len(call.shape(0)) > 1 else None)
    tensor, shape = _matmul(a, _centred(call, 1, 3, -1), call.shape(0), call.shape(1))
    return shaped(tensor, shape)


def _matmul(a: Any, b: Any, left: Any, right: Any) -> tuple[Any, tuple[int, ...]]:
    batch = np.broadcast_shapes(left[:-2], right[:-2])
    rows = () if len(left) == 1 else left[-2:-1]
    columns = () if len(right) == 1 else right[-1:]
    return _products(a, b), (*batch, *rows, *columns)


@operator("ConvInteger")
def _conv_integer(call: Call) -> Value:
    x, w = _centred(call, 0, 2, None), _centred(call, 1, 3, 0)
    tensor = _convolutions(call, x, w)
    return shaped(tensor, tensor.ir.shape)


@operator("QLinearMatMul")
def _qlinear_matmul(call: Call) -> Value:
    a = _centred(call, 0, 2, -2)
    tensor, shape = _matmul(a, _centred(call, 3, 5, -1), call.shape(0), call.shape(3))
    rows = ark.cast(call.tensor(1), ark.fp32)
    if len(call.shape(1)) == 1 and call.shape(1) != (1,):
        rows = ark.reshape(rows, [-1, 1])
    columns, steps = (ark.cast(call.tensor(i), ark.fp32) for i in (4, 6))
    scale = ark.div(ark.mul(rows, columns), steps)
    return _requantised(call, tensor, scale, shape, 7)


@operator("QLinearConv")
def _qlinear_conv(call: Call) -> Value:
    x, w = _centred(call, 0, 2, None), _centred(call, 3, 5, 0)
    tensor = _convolutions(call, x, w)
    rank = len(tensor.ir.shape)
    scale = ark.mul(call.tensor(1), call.tensor(4))
    if call.has(8):
        bias = ark.reshape(call.tensor(8), [1, -1, *[1] * (rank - 2)])
        tensor = ark.add(tensor, bias)
    scale = ark.div(scale, call.tensor(6))
    if call.shape(4) not in ((), (1,)):
        scale = ark.reshape(scale, [1, -1, *[1] * (rank - 2)])
    return _requantised(call, tensor, scale, tuple(tensor.ir.shape), 7)


def _requantised(call: Call, total: Any, scale: Any, shape: tuple[int, ...], zero: int) -> Value:
    """Rescales int32 sums to the quantised type of the operator's result. zero: the number of the
    input with the result's zero point.
    """
    dtype = np.dtype(call.value(zero).dtype)
    point = ark.cast(call.tensor(zero), ark.fp32)
    steps = ark.mul(ark.cast(total, ark.fp32), scale)
    if dtype not in _BITS8:
        raise refuse(f"{call.op} to {dtype}")
    return shaped(_rounded(steps, point, dtype), shape)
