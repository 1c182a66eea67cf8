"""Elementwise ATen operators: functions and arithmetic. Comparisons and selections are in
`comparisons`, fills and copies in `creation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ark
from ark.interop.torch import comparisons, creation
from ark.interop.torch.values import (
    TABLE,
    Call,
    Value,
    cast,
    floating,
    number,
    operator,
    refuse,
)
from ark.ops.elementwise import binary
from ark.tasks.functions import FUNCTIONS


def _trunc(tensor: Any) -> Any:
    """Truncates toward zero."""
    return ark.mul(ark.sign(tensor), ark.floor(ark.abs(tensor)))


def _sign(tensor: Any) -> Any:
    """The sign of each element; 0 for NaN."""
    return ark.where(ark.isnan(tensor), 0.0, ark.sign(tensor))


_UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": ark.abs,
    "ceil": ark.ceil,
    "cos": ark.cos,
    "erf": ark.erf,
    "exp": ark.exp,
    "exp2": lambda x: ark.exp(x * math.log(2)),
    "expm1": ark.expm1,
    "floor": ark.floor,
    "frac": lambda x: ark.sub(x, _trunc(x)),
    "hardsigmoid": lambda x: ark.clip(x * (1 / 6) + 0.5, 0.0, 1.0),
    "hardswish": lambda x: x * ark.clip(x * (1 / 6) + 0.5, 0.0, 1.0),
    "log": ark.ln,
    "log10": lambda x: ark.mul(ark.ln(x), 1 / math.log(10)),
    "log1p": ark.log1p,
    "log_sigmoid": ark.log_sigmoid,
    "mish": ark.mish,
    "neg": ark.neg,
    "reciprocal": ark.reciprocal,
    "relu": ark.relu,
    "relu6": lambda x: ark.clip(x, 0.0, 6.0),
    "round": ark.round,
    "rsqrt": ark.rsqrt,
    "selu": ark.selu,
    "sgn": _sign,
    "sigmoid": ark.sigmoid,
    "sign": _sign,
    "silu": ark.silu,
    "sin": ark.sin,
    "softsign": ark.softsign,
    "sqrt": ark.sqrt,
    "square": lambda x: x * x,
    "tanh": ark.tanh,
    "trunc": _trunc,
}
_UNARY |= {f.public.torch: getattr(ark, f.name) for f in FUNCTIONS.values() if f.public}
_WHOLE = ("abs", "ceil", "floor", "neg", "round", "sgn", "sign", "square", "trunc", "relu")


def _unary(name: str, function: Callable[[Any], Any]) -> Callable[..., Any]:
    def run(call: Call, x: Value, **_: Any) -> Any:
        if not x.dtype.is_floating_point and name in _WHOLE:
            if name in ("ceil", "floor", "round", "trunc"):
                return ark.copy(x.tensor)
            if name in ("sgn", "sign"):
                return ark.sign(x.tensor)
            if name == "relu":
                return ark.maximum(x.tensor, 0)
            return function(x.tensor)
        return function(floating(x))

    return run


for _name, _function in _UNARY.items():
    operator(f"{_name}.default")(_unary(_name, _function))


@operator("gelu.default")
def _gelu(call: Call, x: Value, approximate: str = "none") -> Any:
    return ark.gelu(x.tensor) if approximate == "tanh" else ark.gelu_erf(x.tensor)


@operator("leaky_relu.default")
def _leaky_relu(call: Call, x: Value, slope: float = 0.01) -> Any:
    return ark.leaky_relu(x.tensor, slope)


@operator("elu.default")
def _elu(call: Call, x: Value, alpha: float = 1.0, scale: float = 1, input_scale: float = 1) -> Any:
    if scale != 1 or input_scale != 1:
        raise refuse("a scaled elu")
    return ark.elu(x.tensor, alpha)


@operator("softplus.default")
def _softplus(call: Call, x: Value, beta: float = 1, threshold: float = 20) -> Any:
    scaled = ark.mul(x.tensor, float(beta))
    soft = ark.mul(ark.log_sigmoid(ark.neg(scaled)), -1.0 / beta)
    return ark.where(ark.greater(scaled, float(threshold)), x.tensor, soft)


@operator("isnan.default")
def _isnan(call: Call, x: Value) -> Any:
    return ark.isnan(floating(x))


@operator("isinf.default")
def _isinf(call: Call, x: Value) -> Any:
    return ark.isinf(floating(x))


def _binary(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def run(call: Call, x: Any, y: Any) -> Any:
        return function(cast(x, call.dtype), cast(number(y, call.dtype), call.dtype))

    return run


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "mul": ark.mul,
    "maximum": ark.maximum,
    "minimum": ark.minimum,
    "fmax": lambda a, b: ark.where(ark.isnan(a), b, ark.where(ark.isnan(b), a, ark.maximum(a, b))),
    "fmin": lambda a, b: ark.where(ark.isnan(a), b, ark.where(ark.isnan(b), a, ark.minimum(a, b))),
    "remainder": ark.mod,
    "fmod": ark.fmod,
    "pow": ark.pow,
    "atan2": ark.atan2,
}
for _name, _pair in _BINARY.items():
    for _kind in ("default", "Tensor", "Scalar", "Tensor_Tensor", "Tensor_Scalar"):
        operator(f"{_name}.{_kind}")(_binary(_pair))


@operator("pow.Scalar")
def _pow_of(call: Call, x: float, y: Value) -> Any:
    return ark.pow(number(x, call.dtype), cast(y, call.dtype))


@operator("add.Tensor", "add.Scalar")
def _add(call: Call, x: Value, y: Any, alpha: float = 1) -> Any:
    return ark.add(cast(x, call.dtype), _scaled(call, y, alpha))


@operator("sub.Tensor", "sub.Scalar")
def _sub(call: Call, x: Value, y: Any, alpha: float = 1) -> Any:
    return ark.sub(cast(x, call.dtype), _scaled(call, y, alpha))


@operator("rsub.Tensor", "rsub.Scalar")
def _rsub(call: Call, x: Value, y: Any, alpha: float = 1) -> Any:
    scaled = x if alpha == 1 else Value(x.shape, x.dtype, ark.mul(cast(x, call.dtype), alpha))
    return ark.sub(cast(number(y, call.dtype), call.dtype), cast(scaled, call.dtype))


def _scaled(call: Call, y: Any, alpha: float) -> Any:
    if not isinstance(y, Value):
        return number(y * alpha, call.dtype)
    tensor = cast(y, call.dtype)
    return tensor if alpha == 1 else ark.mul(tensor, number(alpha, call.dtype))


@operator("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode", "true_divide.Tensor")
def _div(call: Call, x: Value, y: Any, rounding_mode: str | None = None) -> Any:
    kind = call.dtype
    whole = kind not in (ark.fp32, ark.fp16, ark.bf16)
    a, b = cast(x, kind), cast(number(y, kind), kind)
    if rounding_mode == "floor":
        return binary("floor_divide", a, b, None, "")
    quotient = ark.div(a, b)
    if rounding_mode == "trunc" and not whole:
        return _trunc(quotient)
    return quotient


@operator("floor_divide.default")
def _floor_divide(call: Call, x: Value, y: Any) -> Any:
    return _div(call, x, y, "floor")


@operator("clamp.default", "clamp_min.default")
def _clamp(call: Call, x: Value, low: Any = None, high: Any = None) -> Any:
    return ark.clip(cast(x, call.dtype), low, high)


@operator("clamp_max.default")
def _clamp_max(call: Call, x: Value, high: Any) -> Any:
    return ark.clip(cast(x, call.dtype), None, high)


@operator("hardtanh.default")
def _hardtanh(call: Call, x: Value, low: float = -1, high: float = 1) -> Any:
    return ark.clip(x.tensor, low, high)


@operator("clamp.Tensor")
def _clamp_tensor(call: Call, x: Value, low: Any = None, high: Any = None) -> Any:
    clamped = cast(x, call.dtype)
    clamped = clamped if low is None else ark.maximum(clamped, cast(low, call.dtype))
    return clamped if high is None else ark.minimum(clamped, cast(high, call.dtype))


@operator("addcmul.default")
def _addcmul(call: Call, x: Value, a: Value, b: Value, value: float = 1) -> Any:
    kind = call.dtype
    return ark.add(cast(x, kind), ark.mul(ark.mul(cast(a, kind), cast(b, kind)), value))


@operator("addcdiv.default")
def _addcdiv(call: Call, x: Value, a: Value, b: Value, value: float = 1) -> Any:
    kind = call.dtype
    return ark.add(cast(x, kind), ark.mul(ark.div(cast(a, kind), cast(b, kind)), float(value)))


@operator("lerp.Scalar", "lerp.Tensor")
def _lerp(call: Call, x: Value, y: Value, weight: Any) -> Any:
    """Linear interpolation between x and y. For weights below 1/2 it is x + w (y - x), otherwise y
    - (1 - w) (y - x), as in torch; one formula for all weights would lose digits of the smaller
    end.
    """
    step = ark.sub(y.tensor, x.tensor)
    if isinstance(weight, Value):
        share = cast(weight, call.dtype)
        near = ark.less(ark.abs(share), 0.5)
        from_y = ark.sub(y.tensor, ark.mul(step, ark.sub(1.0, share)))
        return ark.where(near, ark.add(x.tensor, ark.mul(step, share)), from_y)
    if abs(weight) < 0.5:
        return ark.add(x.tensor, ark.mul(step, weight))
    return ark.sub(y.tensor, ark.mul(step, 1.0 - weight))


@operator("hypot.default")
def _hypot(call: Call, x: Value, y: Value) -> Any:
    return ark.hypot(x.tensor, y.tensor)


# The operators that work element by element, on operands that are broadcast to one shape.
_MODULES = (__name__, comparisons.__name__, creation.__name__)
_INDICES = ("arange.start_step", "arange.default", "arange.start")
ELEMENTWISE = frozenset(n for n, f in TABLE.items() if f.__module__ in _MODULES) - {*_INDICES}
