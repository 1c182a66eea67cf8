"""Converts ONNX operators that work element by element."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

import ark
from ark.interop.onnx import carried
from ark.interop.onnx.values import (
    TABLE,
    Call,
    Value,
    data_type,
    kind_of,
    operator,
    refuse,
    shaped,
)
from ark.ir.dtype import FLOATS, SMALL_FLOATS
from ark.tasks.functions import FUNCTIONS

_SAME = {
    "Abs": ark.abs,
    "BitwiseNot": ark.bitwise_not,
    "Ceil": ark.ceil,
    "Cos": ark.cos,
    "Erf": ark.erf,
    "Exp": ark.exp,
    "Floor": ark.floor,
    "HardSwish": ark.hard_swish,
    "IsNaN": ark.isnan,
    "Log": ark.ln,
    "Mish": ark.mish,
    "Neg": ark.neg,
    "Not": ark.logical_not,
    "Reciprocal": ark.reciprocal,
    "Round": ark.round,
    "Sigmoid": ark.sigmoid,
    "Sign": ark.sign,
    "Sin": ark.sin,
    "Softsign": ark.softsign,
    "Sqrt": ark.sqrt,
    "Tanh": ark.tanh,
}
_SAME |= {
    f.public.onnx: getattr(ark, f.name)
    for f in FUNCTIONS.values()
    if f.public is not None and f.public.onnx
}
_PAIRS = {
    "Add": ark.add,
    "And": ark.logical_and,
    "BitwiseAnd": ark.bitwise_and,
    "BitwiseOr": ark.bitwise_or,
    "BitwiseXor": ark.bitwise_xor,
    "Div": ark.div,
    "Equal": ark.equal,
    "Greater": ark.greater,
    "GreaterOrEqual": ark.greater_equal,
    "Less": ark.less,
    "LessOrEqual": ark.less_equal,
    "Mul": ark.mul,
    "Or": ark.logical_or,
    "Sub": ark.sub,
    "Xor": ark.logical_xor,
}


def _unary(function: Callable[..., Any]) -> Callable[[Call], Value]:
    return lambda call: shaped(function(call.tensor(0)), call.shape(0))


def _pair(call: Call, function: Callable[..., Any]) -> Value:
    shape = np.broadcast_shapes(call.shape(0), call.shape(1))
    return shaped(function(call.tensor(0), call.tensor(1)), shape)


def _binary(function: Callable[..., Any]) -> Callable[[Call], Value]:
    return lambda call: _pair(call, function)


for _name, _function in _SAME.items():
    operator(_name)(_unary(_function))
for _name, _joined in _PAIRS.items():
    operator(_name)(_binary(_joined))


def _float_relu(tensor: Any) -> Any:
    return ark.relu(tensor) if tensor.ir.dtype in FLOATS else ark.maximum(tensor, 0)


operator("Relu")(_unary(_float_relu))


@operator("Identity")
def _identity(call: Call) -> Value:
    value = call.value(0)
    return value if value.items is not None else shaped(call.tensor(0), value.shape)


@operator("Mod")
def _mod(call: Call) -> Value:
    return _pair(call, ark.fmod if call.attribute("fmod", 0) else ark.mod)


@operator("BitShift")
def _shift(call: Call) -> Value:
    left = call.attribute("direction") == "LEFT"
    return _pair(call, ark.shift_left if left else ark.shift_right)


@operator("Pow")
def _pow(call: Call) -> Value:
    shape = np.broadcast_shapes(call.shape(0), call.shape(1))
    exponent, dtype = call.value(1), call.dtype(0)
    if exponent.array is not None and exponent.array.size == 1 and dtype in FLOATS:
        return shaped(ark.pow(call.tensor(0), float(exponent.array.item())), shape)
    other = call.tensor(1)
    if dtype in FLOATS or call.dtype(1) not in FLOATS:
        return shaped(ark.pow(call.tensor(0), _as(other, dtype)), shape)
    # A power of integers with a floating-point exponent is computed in fp32.
    return shaped(_as(ark.pow(ark.cast(call.tensor(0), ark.fp32), other), dtype), shape)


def _as(tensor: Any, dtype: Any) -> Any:
    return tensor if tensor.ir.dtype == dtype else ark.cast(tensor, dtype)


def _many(function: Callable[..., Any], mean: bool = False) -> Callable[[Call], Value]:
    def run(call: Call) -> Value:
        places = range(len(call.inputs))
        tensor = functools.reduce(function, [call.tensor(i) for i in places])
        tensor = ark.div(tensor, float(len(places))) if mean else tensor
        return shaped(tensor, np.broadcast_shapes(*(call.shape(i) for i in places)))

    return run


operator("Max")(_many(ark.maximum))
operator("Min")(_many(ark.minimum))
operator("Sum")(_many(ark.add))
operator("Mean")(_many(ark.add, mean=True))


@operator("Where")
def _where(call: Call) -> Value:
    shape = np.broadcast_shapes(*(call.shape(i) for i in range(3)))
    return shaped(ark.where(call.tensor(0), call.tensor(1), call.tensor(2)), shape)


@operator("Clip")
def _clip(call: Call) -> Value:
    tensor = call.tensor(0)
    if call.has(1):
        tensor = ark.maximum(tensor, call.tensor(1))
    if call.has(2):
        tensor = ark.minimum(tensor, call.tensor(2))
    return shaped(tensor, call.shape(0))


@operator("Cast")
def _cast(call: Call) -> Value:
    return _cast_to(call, onnx.helper.tensor_dtype_to_np_dtype(call.attribute("to")))


def _cast_to(call: Call, wanted: Any) -> Value:
    """A cast to the type `wanted`. Casts to floats of 8 bits saturate by default: values that are
    too large become the largest value of the type.
    """
    tensor, source, dtype = call.tensor(0), call.value(0).kind, data_type(wanted)
    saturate, kind = bool(call.attribute("saturate", 1)), kind_of(wanted)
    if kind is not None:
        tensor = carried.cast(tensor, source, kind, saturate, call.attribute("round_mode", "up"))
    elif source == carried.UINT64 and dtype in (*FLOATS, *SMALL_FLOATS):
        tensor = carried.unsigned_float(tensor)
    if dtype in SMALL_FLOATS and tensor.ir.dtype != dtype:
        tensor = carried.to_float(_as(tensor, ark.fp32), np.dtype(wanted), saturate)
    value = shaped(_as(tensor, dtype), call.shape(0))
    value.kind = kind
    return value


@operator("CastLike")
def _cast_like(call: Call) -> Value:
    known, wanted = call.value(0).array, call.value(1).dtype
    if known is None:
        return _cast_to(call, wanted)
    limited = np.dtype(wanted).itemsize == 1 and call.attribute("saturate", 1)
    if known.dtype.kind == "f" and limited and data_type(wanted) in (*SMALL_FLOATS, ark.fp32):
        return Value(known.shape, array=onnx.numpy_helper.saturate_cast(known, np.dtype(wanted)))
    return Value(known.shape, array=known.astype(wanted))


@operator("IsInf")
def _isinf(call: Call) -> Value:
    tensor = call.tensor(0)
    negative, positive = call.attribute("detect_negative", 1), call.attribute("detect_positive", 1)
    infinite = ark.isinf(tensor)
    if not negative:
        infinite = ark.logical_and(infinite, ark.greater(tensor, 0.0))
    if not positive:
        infinite = ark.logical_and(infinite, ark.less(tensor, 0.0))
    return shaped(infinite, call.shape(0))


def _with(function: Callable[..., Any], **defaults: tuple[str, float]) -> Callable[[Call], Value]:
    """Returns the converter of an activation that has numeric attributes. function: ark's
    activation. defaults: for each parameter of `function`, the name of the attribute in ONNX and
    its default.
    """

    def run(call: Call) -> Value:
        words = {own: call.attribute(name, value) for own, (name, value) in defaults.items()}
        return shaped(function(call.tensor(0), **words), call.shape(0))

    return run


operator("Elu")(_with(ark.elu, alpha=("alpha", 1.0)))
operator("LeakyRelu")(_with(ark.leaky_relu, slope=("alpha", 0.01)))
operator("HardSigmoid")(_with(ark.hard_sigmoid, alpha=("alpha", 0.2), beta=("beta", 0.5)))
operator("Selu")(
    _with(ark.selu, alpha=("alpha", 1.6732632423543772), gamma=("gamma", 1.0507009873554805))
)


@operator("Gelu")
def _gelu(call: Call) -> Value:
    exact = call.attribute("approximate", "none") == "none"
    return shaped((ark.gelu_erf if exact else ark.gelu)(call.tensor(0)), call.shape(0))


@operator("Celu")
def _celu(call: Call) -> Value:
    alpha, x = call.attribute("alpha", 1.0), call.tensor(0)
    return shaped(ark.mul(ark.elu(ark.div(x, alpha)), alpha), call.shape(0))


@operator("ThresholdedRelu")
def _thresholded(call: Call) -> Value:
    x = call.tensor(0)
    return shaped(ark.where(ark.greater(x, call.attribute("alpha", 1.0)), x, 0.0), call.shape(0))


@operator("Softplus")
def _softplus(call: Call) -> Value:
    """ln(1 + e^x), computed as -ln(sigmoid(-x)), which does not overflow."""
    return shaped(ark.neg(ark.log_sigmoid(ark.neg(call.tensor(0)))), call.shape(0))


@operator("Shrink")
def _shrink(call: Call) -> Value:
    x, bias, edge = call.tensor(0), call.attribute("bias", 0.0), call.attribute("lambd", 0.5)
    if x.ir.dtype not in FLOATS:
        raise refuse("Shrink of integers")
    low = ark.where(ark.less(x, -edge), ark.add(x, bias), 0.0)
    return shaped(ark.where(ark.greater(x, edge), ark.sub(x, bias), low), call.shape(0))


@operator("PRelu")
def _prelu(call: Call) -> Value:
    x, slope = call.tensor(0), call.tensor(1)
    return shaped(ark.where(ark.less(x, 0), ark.mul(x, slope), x), call.shape(0))


@operator("Dropout")
def _dropout(call: Call) -> list[Value]:
    """Converts Dropout, which in inference returns its input and a mask of True."""
    if call.has(2) and bool(call.array(2).item()):
        raise refuse("Dropout in training")
    kept = Value(call.shape(0), call.tensor(0))
    if len(call.outputs) == 1:
        return [kept]
    return [kept, Value(kept.shape, array=np.ones(kept.shape, np.bool_))]


@operator("Swish")
def _swish(call: Call) -> Value:
    alpha, x = call.attribute("alpha", 1.0), call.tensor(0)
    if math.isclose(alpha, 1.0):
        return shaped(ark.silu(x), call.shape(0))
    return shaped(ark.mul(x, ark.sigmoid(ark.mul(x, alpha))), call.shape(0))


# All operators of this module work element by element.
ELEMENTWISE = frozenset(name for name, made_by in TABLE.items() if made_by.__module__ == __name__)
