"""Supports ONNX types with which ark does not compute. The values of such a type are stored in
another type, its carrier, which can represent all of them.

Integers of 2, 4 and 16 bits are carried by int32, uint64 is carried by int64 with the same bits,
and small floats are carried by fp32. Operators that only move elements accept all carried types.
Integer arithmetic is computed in the carrier and then truncated to the type. This module implements
the operators whose results for uint64 and int64 differ. Casts to a carried type round to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import ark
from ark.interop.onnx.values import CARRIERS, Call, Operator, Value, data_type, refuse, shaped
from ark.ir.dtype import FLOATS, SMALL_FLOATS

UINT64 = np.dtype(np.uint64)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
INTEGERS = {kind for kind, carrier in CARRIERS.items() if carrier == ark.int32}
_MOVES = {
    *("Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND"),
    *("Identity", "If", "Loop", "Optional", "OptionalGetElement", "OptionalHasElement", "Pad"),
    *("Reshape", "ReverseSequence", "Scan", "SequenceAt", "SequenceConstruct", "SequenceErase"),
    *("SequenceInsert", "Shape", "Size", "Slice", "SpaceToDepth", "Split", "SplitToSequence"),
    *("Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "EyeLike", "BitCast"),
    *("Cast", "CastLike", "QuantizeLinear", "DequantizeLinear", "ConstantOfShape"),
}
_EXACT = {  # results of values within the type are within the type
    *("ArgMax", "ArgMin", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Clip", "Equal", "Greater"),
    *("GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "ReduceMax", "ReduceMin"),
    *("Sign", "TopK", "Hardmax"),
}
_ARITHMETIC = {
    *("Abs", "Add", "BitShift", "BitwiseNot", "CumSum", "Div", "Mul", "Neg", "Pow", "ReduceProd"),
    *("ReduceSum", "Sub", "Sum", "Range"),
}
_OTHERS = {"Pow", "TopK"}  # these check the types themselves
# Operators whose result on int64 has the same bits as their result on uint64.
_SAME_BITS = {
    *("Add", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Equal", "Mul", "Sub", "Sum"),
    *("ReduceSum", "CumSum"),
}


def run(call: Call, operator: Operator, schema: Any) -> Any:
    """Computes the results of a call. If inputs have types that are carried by another type, the
    operator is applied to the carriers' values, and results get the carried types. Raises
    UnsupportedError if the operator does not support a carried type.
    """
    places = [
        (i, v.kind) for i, v in enumerate(call.inputs) if v is not None and v.kind is not None
    ]
    if not places or call.bodies:  # graphs within the node give their results types themselves
        return operator(call)
    for _, kind in places:
        whole = kind in INTEGERS and call.op in _EXACT | _ARITHMETIC
        wide = kind == UINT64 and call.op in _SAME_BITS | UNSIGNED.keys()
        if not (whole or wide or call.op in _MOVES or call.op in _OTHERS):
            raise refuse(f"{call.op} of {kind}")
    if call.op in UNSIGNED and any(kind == UINT64 for _, kind in places):
        operator = UNSIGNED[call.op]
    results = operator(call)
    if results is None or isinstance(results, Value):
        results = [results]
    names = {_name(schema.inputs, place): kind for place, kind in places}
    for place, value in enumerate(results):
        kind = names.get(_name(schema.outputs, place))
        if value is None or value.items is not None or value.kind is not None or kind is None:
            continue
        if value.array is not None:
            results[place] = Value(value.shape, array=value.array.astype(kind), inputs=value.inputs)
            continue
        value.kind = kind
        if kind in INTEGERS and call.op in _ARITHMETIC:
            value.tensor = cut(value.tensor, kind)
    return results


def _name(formal: Any, place: int) -> str:
    """The name of the type that an operator's schema declares for input or output `place`. Further
    inputs of an operator with any number of inputs have the type of the last declared one.
    """
    return str(formal[min(place, len(formal) - 1)].type_str)


def cut(tensor: Any, kind: Any) -> Any:
    """Truncates an int32 tensor to the lowest bits of the integer type `kind`, with the sign of
    this type.
    """
    info = ml_dtypes.iinfo(kind)
    if info.min == 0:
        return ark.bitwise_and(tensor, int(info.max))
    return ark.shift_right(ark.shift_left(tensor, 32 - info.bits), 32 - info.bits)


def cast(tensor: Any, source: Any, kind: Any, saturate: bool, how: str = "up") -> Any:
    """A tensor cast to a carried type. source: the carried type that the tensor now has, or
    None.
    """
    if source == UINT64 and kind not in INTEGERS:
        tensor = tensor if kind == UINT64 else unsigned_float(tensor)
    if kind in INTEGERS:
        return cut(_as(tensor, ark.int32), kind)
    if kind == UINT64:
        return _whole(tensor) if tensor.ir.dtype in FLOATS else _as(tensor, ark.int64)
    tensor = _as(tensor, ark.fp32)
    return _power(tensor, saturate, how) if kind == E8M0 else _rounded(tensor, kind, saturate)


def to_float(tensor: Any, dtype: Any, saturate: bool) -> Any:
    """fp32 rounded to a float of 8 or 4 bits. Raises UnsupportedError for other types. saturate:
    values that are too large become the largest value of the type.
    """
    small = data_type(dtype)
    if dtype in CARRIERS:
        return cast(tensor, None, dtype, saturate)
    if small not in SMALL_FLOATS:
        raise refuse(f"quantising to {dtype}")
    if saturate:
        most = float(ml_dtypes.finfo(dtype).max)
        tensor = ark.where(ark.greater(tensor, most), most, tensor)
        tensor = ark.where(ark.less(tensor, -most), -most, tensor)
    return ark.cast(tensor, small)


def _as(tensor: Any, dtype: Any) -> Any:
    return tensor if tensor.ir.dtype == dtype else ark.cast(tensor, dtype)


def _power_below(size: Any, least: int, most: int) -> Any:
    """The largest power of two that is at most `size` (positive fp32), with an exponent from
    `least` to `most`.
    """
    power = ark.constant(2.0**least, list(size.ir.shape), ark.fp32)
    reach = most - least
    for step in [64] * (reach // 64) + [s for s in (32, 16, 8, 4, 2, 1) if s <= reach]:
        wider = ark.mul(power, 2.0**step)
        fits = ark.logical_and(ark.greater_equal(size, wider), ark.less_equal(wider, 2.0**most))
        power = ark.where(fits, wider, power)
    return power


def _rounded(tensor: Any, kind: Any, saturate: bool) -> Any:
    """fp32 rounded to a float type with fewer bits; ties are rounded to even."""
    info = ml_dtypes.finfo(kind)
    most, least = float(info.max), int(info.minexp)
    size = ark.abs(tensor)
    unit = ark.mul(_power_below(size, least, int(np.log2(most))), 2.0**-info.nmant)
    near = ark.mul(ark.round(ark.div(tensor, unit)), unit)
    if kind == np.dtype(ml_dtypes.float4_e2m1fn):  # this type has no NaN and no infinity
        return ark.minimum(ark.maximum(near, -most), most)
    over = ark.greater(ark.abs(near), most)
    if saturate:
        return ark.add(ark.minimum(ark.maximum(near, -most), most), 0.0)
    else:
        near = ark.where(over, float("nan"), near)
    return ark.add(near, 0.0)  # adding 0 changes -0, which these types do not have, to 0


def _power(tensor: Any, saturate: bool, how: str) -> Any:
    """fp32 rounded, by its absolute value, to a power of two. The result is NaN if it is not
    finite.
    """
    size = ark.abs(tensor)
    power = _power_below(size, -127, 127)
    edge = {"up": 1.0, "nearest": 1.5, "down": 2.0}[how]
    above = ark.greater_equal if how == "nearest" else ark.greater
    wide = above(size, ark.mul(power, edge))
    last = ark.greater_equal(power, 2.0**127)
    beyond = power if saturate else float("nan")
    up = ark.where(last, beyond, ark.mul(ark.minimum(power, 2.0**126), 2.0))
    power = ark.where(wide, up, power) if how != "down" else power
    finite = ark.less(size, float("inf"))
    return ark.where(finite, power, float("nan"))


def _flipped(tensor: Any) -> Any:
    """Flips the highest bit of uint64 values, which int64 carries. Comparing the results as int64
    gives the order of the values as uint64.
    """
    return ark.bitwise_xor(tensor, MIN_INT64)


MIN_INT64 = -(2**63)


def _less(a: Any, b: Any) -> Any:
    return ark.less(_flipped(a), _flipped(b))


def _halved(tensor: Any) -> Any:
    """A uint64 shifted right by one bit."""
    return ark.bitwise_and(ark.shift_right(tensor, 1), 2**63 - 1)


def _shifted(a: Any, b: Any) -> Any:
    rest = ark.shift_right(_halved(a), ark.maximum(ark.sub(b, 1), 0))
    return ark.where(ark.equal(b, 0), a, rest)


def _divided(a: Any, b: Any) -> Any:
    """The quotient of two uint64 (Hacker's Delight, 9-3). Half of the dividend is divided, and the
    quotient is doubled. If the remainder is then at least the divisor, the quotient is increased by
    one.
    """
    small = ark.greater_equal(b, 0)
    safe = ark.where(small, b, 1)
    near = ark.shift_left(ark.div(_halved(a), safe), 1)
    rest = ark.sub(a, ark.mul(near, safe))
    near = ark.add(near, ark.cast(ark.logical_not(_less(rest, safe)), ark.int64))
    return ark.where(small, near, ark.cast(ark.logical_not(_less(a, b)), ark.int64))


def _remainder(a: Any, b: Any) -> Any:
    return ark.sub(a, ark.mul(_divided(a, b), b))


def unsigned_float(tensor: Any) -> Any:
    """A uint64 converted to fp32."""
    odd = ark.bitwise_and(tensor, 1)
    half = ark.bitwise_or(_halved(tensor), odd)  # keeps the bit that is shifted out
    large = ark.mul(ark.cast(half, ark.fp32), 2.0)
    return ark.where(ark.less(tensor, 0), large, ark.cast(tensor, ark.fp32))


def _whole(tensor: Any) -> Any:
    """Floats converted to uint64."""
    large = ark.greater_equal(_as(tensor, ark.fp32), 2.0**63)
    low = ark.where(large, ark.sub(_as(tensor, ark.fp32), 2.0**63), _as(tensor, ark.fp32))
    low = ark.cast(low, ark.int64)
    return ark.where(large, _flipped(low), low)


def _pairwise(function: Callable[[Any, Any], Any]) -> Callable[[Call], Value]:
    def run(call: Call) -> Value:
        tensor, shape = call.tensor(0), call.shape(0)
        for place in range(1, len(call.inputs)):
            tensor = function(tensor, call.tensor(place))
            shape = np.broadcast_shapes(shape, call.shape(place))
        return shaped(tensor, shape)

    return run


def _shift(call: Call) -> Value:
    left = call.attribute("direction") == "LEFT"
    return _pairwise(ark.shift_left if left else _shifted)(call)


def _raised(call: Call) -> Value:
    """Converts Pow of a float with a uint64 exponent."""
    if call.value(0).kind is not None:
        raise refuse(f"Pow of {call.value(0).kind}")
    power = ark.pow(call.tensor(0), _as(unsigned_float(call.tensor(1)), call.dtype(0)))
    return shaped(power, np.broadcast_shapes(call.shape(0), call.shape(1)))


UNSIGNED: dict[str, Operator] = {
    "BitShift": _shift,
    "Div": _pairwise(_divided),
    "Greater": _pairwise(lambda a, b: _less(b, a)),
    "GreaterOrEqual": _pairwise(lambda a, b: ark.logical_not(_less(a, b))),
    "Less": _pairwise(_less),
    "LessOrEqual": _pairwise(lambda a, b: ark.logical_not(_less(b, a))),
    "Max": _pairwise(lambda a, b: ark.where(_less(a, b), b, a)),
    "Min": _pairwise(lambda a, b: ark.where(_less(b, a), b, a)),
    "Mod": _pairwise(_remainder),
    "Pow": _raised,
}
