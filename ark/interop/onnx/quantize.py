"""Quantised values: QuantizeLinear, DequantizeLinear and products of them, computed in fp32."""

from __future__ import annotations

from typing import Any

import numpy as np

import ark
from ark.interop.onnx.values import Call, Value, axis_of, made, operator, refuse

_BITS8 = (ark.int8, ark.uint8)


def _along(call: Call, place: int, tensor: Any, shape: tuple[int, ...]) -> Any:
    """A scale or zero point in fp32, of one value or one for each element of an axis."""
    tensor = ark.cast(tensor, ark.fp32)
    if call.attribute("block_size", 0):
        raise refuse(f"{call.op} by blocks")
    if len(call.shape(place)) != 1 or call.shape(place) == (1,):
        return tensor
    axis = axis_of(call.attribute("axis", 1), len(shape))
    return ark.reshape(tensor, [-1 if d == axis else 1 for d in range(len(shape))])


def _quantized(value: Any, scale: Any, zero: Any, dtype: Any) -> Any:
    """round(value / scale) + zero, halves to even, within the type."""
    if dtype not in _BITS8:
        raise refuse(f"quantising to {dtype.name}")
    limits = np.iinfo(dtype.numpy)
    steps = ark.round(ark.div(value, scale))
    steps = ark.add(steps, zero) if zero is not None else steps
    return ark.cast(ark.minimum(ark.maximum(steps, float(limits.min)), float(limits.max)), dtype)


@operator("QuantizeLinear")
def _quantize(call: Call) -> Value:
    shape = call.shape(0)
    if call.attribute("output_dtype", 0) or call.attribute("precision", 0):
        raise refuse("QuantizeLinear with output_dtype or precision")
    value = ark.cast(call.tensor(0), ark.fp32)
    scale = _along(call, 1, call.tensor(1), shape)
    zero = _along(call, 2, call.tensor(2), shape) if call.has(2) else None
    dtype = call.dtype(2) if call.has(2) else ark.uint8
    return made(_quantized(value, scale, zero, dtype), shape)


@operator("DequantizeLinear")
def _dequantize(call: Call) -> Value:
    shape = call.shape(0)
    if call.dtype(0) not in _BITS8 or call.attribute("output_dtype", 0):
        raise refuse(f"DequantizeLinear of {call.dtype(0).name} or with output_dtype")
    value = ark.cast(call.tensor(0), ark.fp32)
    if call.has(2):
        value = ark.sub(value, _along(call, 2, call.tensor(2), shape))
    value = ark.mul(value, _along(call, 1, call.tensor(1), shape))
    dtype = call.dtype(1)
    return made(value if dtype == ark.fp32 else ark.cast(value, dtype), shape)
