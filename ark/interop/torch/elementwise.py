"""ATen operators that work element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ark
from ark.interop.torch.values import (
    TABLE,
    Call,
    Value,
    cast,
    floating,
    operator,
    promoted,
    refuse,
)


def _trunc(tensor: Any) -> Any:
    """Without what is behind the point."""
    return ark.mul(ark.sign(tensor), ark.floor(ark.abs(tensor)))


def _sign(tensor: Any) -> Any:
    """0 of what is no number."""
    return ark.where(ark.isnan(tensor), 0.0, ark.sign(tensor))


_UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": ark.abs,
    "acos": ark.acos,
    "acosh": ark.acosh,
    "asin": ark.asin,
    "asinh": ark.asinh,
    "atan": ark.atan,
    "atanh": ark.atanh,
    "ceil": ark.ceil,
    "cos": ark.cos,
    "cosh": ark.cosh,
    "erf": ark.erf,
    "erfc": lambda x: ark.sub(1.0, ark.erf(x)),
    "exp": ark.exp,
    "exp2": lambda x: ark.exp(x * math.log(2)),
    "expm1": lambda x: ark.sub(ark.exp(x), 1.0),
    "floor": ark.floor,
    "frac": lambda x: ark.sub(x, _trunc(x)),
    "hardsigmoid": lambda x: ark.clip(x * (1 / 6) + 0.5, 0.0, 1.0),
    "hardswish": lambda x: x * ark.clip(x * (1 / 6) + 0.5, 0.0, 1.0),
    "log": ark.ln,
    "log10": lambda x: ark.mul(ark.ln(x), 1 / math.log(10)),
    "log1p": lambda x: ark.ln(x + 1.0),
    "log2": lambda x: ark.mul(ark.ln(x), 1 / math.log(2)),
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
    "sinh": ark.sinh,
    "softsign": ark.softsign,
    "sqrt": ark.sqrt,
    "square": lambda x: x * x,
    "tan": ark.tan,
    "tanh": ark.tanh,
    "trunc": _trunc,
}
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
        return function(cast(x, call.dtype), cast(_number(y, call.dtype), call.dtype))

    return run


def _number(value: Any, dtype: ark.DataType) -> Any:
    """A number that stands beside a tensor, a float beside floating point."""
    if isinstance(value, Value):
        return value
    return float(value) if dtype in (ark.fp32, ark.fp16, ark.bf16) else value


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "mul": ark.mul,
    "maximum": ark.maximum,
    "minimum": ark.minimum,
    "fmax": lambda a, b: ark.where(ark.isnan(a), b, ark.where(ark.isnan(b), a, ark.maximum(a, b))),
    "fmin": lambda a, b: ark.where(ark.isnan(a), b, ark.where(ark.isnan(b), a, ark.minimum(a, b))),
    "remainder": ark.mod,
    "fmod": ark.fmod,
    "pow": ark.pow,
}
for _name, _pair in _BINARY.items():
    for _kind in ("default", "Tensor", "Scalar", "Tensor_Tensor", "Tensor_Scalar"):
        operator(f"{_name}.{_kind}")(_binary(_pair))


@operator("pow.Scalar")
def _pow_of(call: Call, x: float, y: Value) -> Any:
    return ark.pow(_number(x, call.dtype), cast(y, call.dtype))


@operator("add.Tensor", "add.Scalar")
def _add(call: Call, x: Value, y: Any, alpha: float = 1) -> Any:
    return ark.add(cast(x, call.dtype), _scaled(call, y, alpha))


@operator("sub.Tensor", "sub.Scalar")
def _sub(call: Call, x: Value, y: Any, alpha: float = 1) -> Any:
    return ark.sub(cast(x, call.dtype), _scaled(call, y, alpha))


@operator("rsub.Tensor", "rsub.Scalar")
def _rsub(call: Call, x: Value, y: Any, alpha: float = 1) -> Any:
    scaled = x if alpha == 1 else Value(x.shape, x.dtype, ark.mul(cast(x, call.dtype), alpha))
    return ark.sub(cast(_number(y, call.dtype), call.dtype), cast(scaled, call.dtype))


def _scaled(call: Call, y: Any, alpha: float) -> Any:
    if not isinstance(y, Value):
        return _number(y * alpha, call.dtype)
    tensor = cast(y, call.dtype)
    return tensor if alpha == 1 else ark.mul(tensor, _number(alpha, call.dtype))


@operator("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode", "true_divide.Tensor")
def _div(call: Call, x: Value, y: Any, rounding_mode: str | None = None) -> Any:
    kind = call.dtype
    whole = kind not in (ark.fp32, ark.fp16, ark.bf16)
    a, b = cast(x, kind), cast(_number(y, kind), kind)
    if whole and rounding_mode == "floor":
        return ark.div(ark.sub(a, ark.mod(a, b)), b)
    made = ark.div(a, b)
    if rounding_mode == "floor":
        return ark.floor(made)
    if rounding_mode == "trunc" and not whole:
        return _trunc(made)
    return made


@operator("floor_divide.default")
def _floor_divide(call: Call, x: Value, y: Any) -> Any:
    return _div(call, x, y, "floor")


for _name, _comparison in {
    "eq": ark.equal,
    "ne": ark.not_equal,
    "lt": ark.less,
    "le": ark.less_equal,
    "gt": ark.greater,
    "ge": ark.greater_equal,
}.items():

    def _compare(call: Call, x: Value, y: Any, function: Any = _comparison) -> Any:
        kind = promoted(x, y)
        if kind == ark.bool and function not in (ark.equal, ark.not_equal):
            kind = ark.uint8
        if kind == ark.bool and not isinstance(y, Value):
            y = Value((), x.dtype, ark.constant(int(y), [1], ark.bool))
        return function(cast(x, kind), cast(_number(y, kind), kind))

    operator(f"{_name}.Tensor", f"{_name}.Scalar")(_compare)


def _truth(value: Value) -> Any:
    return cast(value, ark.bool)


for _name, _join in {
    "logical_and": ark.logical_and,
    "logical_or": ark.logical_or,
    "logical_xor": ark.logical_xor,
}.items():

    def _logical(call: Call, x: Value, y: Value, function: Any = _join) -> Any:
        return function(_truth(x), _truth(y))

    operator(f"{_name}.default")(_logical)

for _name, _bits, _bools in (
    ("bitwise_and", ark.bitwise_and, ark.logical_and),
    ("bitwise_or", ark.bitwise_or, ark.logical_or),
    ("bitwise_xor", ark.bitwise_xor, ark.logical_xor),
):

    def _bitwise(call: Call, x: Value, y: Any, bits: Any = _bits, bools: Any = _bools) -> Any:
        if call.dtype == ark.bool:
            other = y if isinstance(y, Value) else None
            if other is None:
                raise refuse("a bitwise operator of bool and a number")
            return bools(x.tensor, other.tensor)
        return bits(cast(x, call.dtype), cast(y, call.dtype))

    operator(f"{_name}.Tensor", f"{_name}.Scalar")(_bitwise)


@operator("logical_not.default")
def _logical_not(call: Call, x: Value) -> Any:
    return ark.logical_not(_truth(x))


@operator("bitwise_not.default")
def _bitwise_not(call: Call, x: Value) -> Any:
    return (ark.logical_not if call.dtype == ark.bool else ark.bitwise_not)(x.tensor)


@operator("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(call: Call, test: Value, x: Any, y: Any) -> Any:
    sides = [cast(_number(v, call.dtype), call.dtype) for v in (x, y)]
    if not any(isinstance(v, Value) for v in (x, y)):
        sides[0] = ark.constant(sides[0], [1], call.dtype)
    return ark.where(_truth(test), *sides)


@operator("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(call: Call, x: Value, mask: Value, value: Any) -> Any:
    return ark.where(_truth(mask), cast(_number(value, call.dtype), call.dtype), x.tensor)


@operator("clamp.default", "clamp_min.default", "clamp_max.default", "hardtanh.default")
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
    made = cast(x, call.dtype)
    made = made if low is None else ark.maximum(made, cast(low, call.dtype))
    return made if high is None else ark.minimum(made, cast(high, call.dtype))


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
    part = ark.mul(ark.sub(y.tensor, x.tensor), cast(weight, call.dtype))
    return ark.add(x.tensor, part)


@operator("hypot.default")
def _hypot(call: Call, x: Value, y: Value) -> Any:
    return ark.sqrt(ark.add(ark.mul(x.tensor, x.tensor), ark.mul(y.tensor, y.tensor)))


@operator("_to_copy.default", "clone.default", "alias.default", "detach.default")
def _copied(call: Call, x: Value, **_: Any) -> Any:
    return x.tensor


for _name in ("lift_fresh_copy", "lift_fresh", "positive", "contiguous", "view_of"):
    operator(f"{_name}.default")(_copied)


@operator("copy.default")
def _copy(call: Call, x: Value, y: Value, non_blocking: bool = False) -> Any:
    return ark.expand(y.tensor, list(x.shape) or [1])


@operator("full.default", "full_like.default", "new_full.default")
def _full(call: Call, _: Any, *rest: Any, **__: Any) -> Any:
    return _filled(call, rest[-1])


def _filled(call: Call, value: Any) -> Any:
    if isinstance(value, Value):
        return ark.expand(cast(value, call.dtype), list(call.shape) or [1])
    value = int(value) if isinstance(value, bool) else value
    return ark.constant(value, list(call.shape) or [1], call.dtype)


for _name, _value in (("zeros", 0), ("ones", 1)):
    for _form in ("{}.default", "{}_like.default", "new_{}.default"):

        def _fill(call: Call, *_: Any, value: int = _value, **__: Any) -> Any:
            return _filled(call, value)

        operator(_form.format(_name))(_fill)

for _name in ("empty.memory_format", "empty_like.default", "new_empty.default"):
    operator(_name)(lambda call, *_, **__: _filled(call, 0))


@operator("fill.Scalar", "fill.Tensor")
def _fill_with(call: Call, _: Value, value: Any) -> Any:
    return _filled(call, value)


@operator("scalar_tensor.default")
def _scalar_tensor(call: Call, value: Any, **_: Any) -> Any:
    return _filled(call, value)


@operator("arange.start_step", "arange.default", "arange.start")
def _arange(call: Call, *bounds: Any, **_: Any) -> Any:
    start, step = (bounds[0] if len(bounds) > 1 else 0), (bounds[2] if len(bounds) > 2 else 1)
    places = ark.iota([call.shape[0]], 0, call.dtype)
    return ark.add(ark.mul(places, _number(step, call.dtype)), _number(start, call.dtype))


# Operators whose results depend, element by element, on operands that are broadcast together.
_INDICES = ("arange.start_step", "arange.default", "arange.start")
ELEMENTWISE = frozenset(n for n, f in TABLE.items() if f.__module__ == __name__) - {*_INDICES}
