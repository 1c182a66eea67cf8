"""The elementwise cases of the sweep over many shapes of common torch ops: functions of one and of
two tensors, functions of integers, broadcast and strided operands, and casts. Called by
ark.cli.measure.cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ark.cli.measure.case import OpCase
from ark.cli.measure.sweep.cases import Function, case, in_both_types
from ark.ir.dtype import bf16, int32, int64, uint8

TINY, MIDDLE, LARGE, ODD = (32, 32), (1024, 1000), (8192, 2048), (1001, 4097)
PLAIN = (
    *("abs", "neg", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos"),
    *("tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "erf", "sigmoid", "floor"),
    *("ceil", "round", "sign", "square", "exp2", "log2", "trunc", "frac"),
)
ACTIVATIONS = (
    *("relu", "gelu", "silu", "leaky_relu", "elu", "selu", "hardsigmoid", "hardswish", "mish"),
    *("softsign", "softplus", "logsigmoid", "relu6", "tanhshrink", "hardtanh", "celu"),
)
POSITIVE = ("log", "log2", "sqrt", "rsqrt", "reciprocal")
COMPARED = ("eq", "ne", "lt", "ge", "logical_and", "logical_xor")
PAIRS = (
    *("add", "sub", "mul", "div", "maximum", "fmod", "remainder", "floor_divide", "pow", "atan2"),
    *COMPARED,
)
INTEGERS = (
    *("add", "mul", "floor_divide", "remainder", "bitwise_and", "bitwise_xor"),
    *("maximum", "eq", "lt", "bitwise_left_shift"),
)


def _one(name: str) -> Function:
    positive = name in POSITIVE
    return lambda t, x: getattr(t, name)(x.abs() + 0.5 if positive else x)


def _activation(name: str) -> Function:
    return lambda t, x: getattr(t.nn.functional, name)(x)


def _two(name: str) -> Function:
    def run(t: Any, a: Any, b: Any) -> Any:
        if name == "pow":
            return t.pow(a.abs(), b)
        return getattr(t, name)(a, b)

    return run


def _integers(name: str) -> Function:
    def run(t: Any, a: Any, b: Any) -> Any:
        return getattr(t, name)(a, b & 7 if "shift" in name else b | 1)

    return run


def _to(name: str) -> Callable[..., Any]:
    return lambda t, x: x.to(getattr(t, name))


def elementwise() -> list[OpCase]:
    table = []
    for shape in (TINY, ODD):
        table += [
            case("exp", _one("exp"), shape),
            *in_both_types("gelu", _activation("gelu"), shape),
        ]
    table += [case(name, _two(name), LARGE, LARGE) for name in PAIRS]
    table += in_both_types("add", _two("add"), ODD, ODD)
    table += in_both_types("add", _two("add"), TINY, TINY)
    for dtype in (int32, int64):
        table += [case(name, _integers(name), LARGE, LARGE, dtype=dtype) for name in INTEGERS]
    table += [*_broadcast(), *_chosen(), *_casts()]
    table += [case(name, _activation(name), LARGE, dtype=bf16) for name in ACTIVATIONS]
    return table + [case(name, _one(name), LARGE, dtype=bf16) for name in PLAIN]


def _broadcast() -> list[OpCase]:
    images, channels = (16, 64, 56, 56), (64, 1, 1)
    pair = _two("add")
    return [
        *in_both_types("outer", lambda t, a, b: t.outer(a, b), (4096,), (4096,)),
        *in_both_types("add-column", pair, (8192, 2048), (8192, 1)),
        *in_both_types("add-row-odd", pair, (8192, 1000), (1000,)),
        *in_both_types("add-row-33", pair, (65536, 33), (33,)),
        *in_both_types("add-channels", pair, images, channels),
        case("add-channels-3", pair, (16, 224, 224, 3), (3,)),
        case("mul-batch", _two("mul"), (64, 128, 512), (64, 1, 512)),
        *in_both_types("add-turned", lambda t, a, b: a.t() + b, (2048, 4096), (4096, 2048)),
        *in_both_types("add-strided", lambda t, a, b: a[:, ::2] + b, (4096, 4096), (4096, 2048)),
        *in_both_types("add-slice", lambda t, a, b: a[:, 1:2001] + b, (4096, 2048), (4096, 2000)),
        *in_both_types("mul-scalar", lambda t, a: a * 2.5, LARGE),
        case(
            "square-distance",
            lambda t, a, b: (a[:, None] - b).square().sum(-1),
            (512, 64),
            (512, 64),
        ),
        *in_both_types(
            "cdist-parts", lambda t, a, b: (a[:, None] - b).abs().sum(-1), (1024, 32), (1024, 32)
        ),
    ]


def _chosen() -> list[OpCase]:
    def masked(t: Any, a: Any, b: Any) -> Any:
        return a.masked_fill(b > 0, -1.0)

    return [
        *in_both_types("where", lambda t, a, b: t.where(a > b, a, b), LARGE, LARGE),
        *in_both_types("masked-fill", masked, LARGE, LARGE),
        *in_both_types("masked-fill-row", masked, (16, 512, 512), (512, 512)),
        *in_both_types("clamp", lambda t, a: a.clamp(-0.5, 0.5), LARGE),
        *in_both_types("lerp", lambda t, a, b: t.lerp(a, b, 0.3), LARGE, LARGE),
        *in_both_types("tril", lambda t, a: a.tril(), (4096, 4096)),
        *in_both_types("triu", lambda t, a: a.triu(1), (64, 512, 512)),
        case("addcmul", lambda t, a, b, c: t.addcmul(a, b, c), LARGE, LARGE, LARGE),
        case("arange", lambda t, a: a + t.arange(2048, device=a.device), LARGE),
    ]


def _casts() -> list[OpCase]:
    return [
        case("to-int32", _to("int32"), LARGE),
        case("to-int64", _to("int64"), LARGE),
        case("to-uint8", _to("uint8"), LARGE),
        case("to-bool", _to("bool"), LARGE),
        case("to-fp16", _to("float16"), LARGE),
        case("to-fp32", _to("float32"), LARGE, dtype=bf16),
        case("to-fp32", _to("float32"), LARGE, dtype=int64),
        case("to-fp32", _to("float32"), LARGE, dtype=uint8),
        case("to-bf16", _to("bfloat16"), ODD),
        case("to-int32", _to("int32"), LARGE, dtype=int64),
    ]
