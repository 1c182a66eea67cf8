"""The table of elementwise functions. Each entry has the C++ expression and the NumPy reference.

An entry with `public` defines a whole op: the users' function, its derivative, the names in torch
and ONNX, tests and the reference page follow from it (docs/new-elementwise-op.md). In the
expression, `a`, `b` and `c` are the inputs as float, and the math functions are those of the device
ABI. Read by ark.ops.elementwise, which registers an op for each entry, and by ark.tasks.expression,
which checks and writes trees of these functions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Public:
    """A function of one floating-point tensor that users call as an op. The op, its derivative,
    documentation and tests are generated from these data.

    meaning: the first words of the op's docstring. example: elements of a tensor, and of the
        result.
    slope: the derivative, a tree of functions over X. torch, onnx: names of operators that compute
        the same. between: the range in which tests compare values and derivatives with those of the
        torch function named `torch`.
    """

    meaning: str
    example: tuple[str, str]
    slope: Sequence[Any]
    torch: str
    onnx: str = ""
    between: tuple[float, float] = (-2.0, 2.0)


@dataclass(frozen=True)
class Gated:
    """A gated function that users call as an op, such as swiglu: `a` is the gate, and `b` the value
    that it scales. The op, its derivatives, documentation and tests are generated from these data.

    meaning: the first words of the op's docstring. example: elements of both tensors, and of the
        result.
    slopes: the derivatives with respect to a and b, trees of functions over X (a) and UP (b).
        torch: the name of the gate's activation in torch.nn.functional, with which tests compare.
    """

    meaning: str
    example: tuple[str, str, str]
    slopes: tuple[Sequence[Any], Sequence[Any]]
    torch: str


# The inputs of a function in the trees of its derivatives (`slope`, `slopes`).
X: Sequence[Any] = ["input", 0]
UP: Sequence[Any] = ["input", 1]
ONE: Sequence[Any] = ["number", 1.0]
_SQUARE = ["mul", X, X]
_SILU_SLOPE = ["mul", ["sigmoid", X], ["add", ONE, ["mul", X, ["sub", ONE, ["sigmoid", X]]]]]
_ARC = ["rsqrt", ["mul", ["sub", ONE, X], ["add", ONE, X]]]


@dataclass(frozen=True)
class Function:
    """An elementwise function. expr: the C++ expression of the floats a, b and c. reference: the
    same function in NumPy, with float64 arguments and result.

    integer: the expression for integers, in which INT is their type (ark_i32 or ark_i64) and UINT
    the unsigned type of the same size; results wrap, and no value causes a trap. None for functions
    of floating point only. floating: False for functions of integers only. predicate: True if the
    result is a bool. ordinal: True if the result is an integer of 32 bits whatever the arguments
    are. logical: True if the arguments are bools. The first argument of the function `where` is a
    bool. public, gated: one of them is set if the entry defines a whole op.

    rounded: a shorter expression for results that are rounded to 16 bits (math16.h); "" if there is
    none. steady: True if the relative error of the result is at most that of the argument.
    """

    name: str
    expr: str
    reference: Callable[..., np.ndarray]
    integer: str | None = None
    floating: bool = True
    predicate: bool = False
    ordinal: bool = False
    logical: bool = False
    rounded: str = ""
    steady: bool = False
    public: Public | None = None
    gated: Gated | None = None

    @property
    def arity(self) -> int:
        """The number of inputs that the expression uses."""
        return len(set(re.findall(r"\b[abc]\b", self.expr)))

    def value_type(self, compute: str) -> str:
        """The C type of the result. compute: the C type of the arguments."""
        return "bool" if self.predicate else "ark_i32" if self.ordinal else compute


def _wrapping(left: str, operator: str, right: str) -> str:
    words = f"static_cast<UINT>({left}) {operator} static_cast<UINT>({right})"
    return f"static_cast<INT>({words})"


def _compare(name: str, operator: str, reference: Callable[..., np.ndarray]) -> Function:
    expr = f"(a {operator} b)"
    return Function(name, expr, reference, expr, predicate=True)


def _logical(name: str, expr: str, reference: Callable[..., np.ndarray]) -> Function:
    return Function(name, expr, reference, predicate=True, logical=True)


def _bits(name: str, expr: str, reference: Callable[..., np.ndarray]) -> Function:
    return Function(name, expr, reference, expr, floating=False)


def _gelu(a: np.ndarray) -> np.ndarray:
    # GELU is a / 2 * (1 + tanh(b)). The equal a / (1 + exp(-2 b)) stays accurate for negative a.
    with np.errstate(over="ignore"):
        return a / (1.0 + np.exp(-2.0 * SQRT_2_OVER_PI * (a + 0.044715 * a**3)))


def _logistic(value: str) -> str:
    """The C++ text of 1 / (1 + exp(-value)), with a reciprocal whose last bit may be wrong."""
    return f"ark_reciprocal(1.0f + ark_exp(-{value}))"


_SILU = f"ark_times(a, {_logistic('a')})"


def _each(function: Callable[[float], float]) -> Callable[[np.ndarray], np.ndarray]:
    """The NumPy function that calls a function of Python's math module for each element."""
    return np.vectorize(function, otypes=[np.float64])


def _softplus(a: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(a, 0.0) + np.log1p(np.exp(-np.abs(a))))


def _order(a: np.ndarray) -> np.ndarray:
    """The NumPy reference of the device function ark_order, which maps floats to integers of the
    same order.
    """
    bits = np.asarray(a, np.float32).view(np.int32).astype(np.int64)
    return np.where(np.isnan(a), MAX_INT32, np.where(bits < 0, -(1 << 31) - bits, bits))


def _philox(at: np.ndarray, key: np.ndarray, stream: np.ndarray) -> np.ndarray:
    """Philox4x32-10, a random number generator, in NumPy, with the numbers of ark_philox."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    place, keys, more = (v.astype(np.int64).astype(np.uint64) for v in (at, key, stream))
    block = place >> np.uint64(2)
    c = list(np.broadcast_arrays(block & low, block >> half, more & low, more >> half))
    k = [keys & low, keys >> half]
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [second >> half ^ c[1] ^ k[0], second & low, first >> half ^ c[3] ^ k[1], first & low]
        k = [k[0] + np.uint64(0x9E3779B9) & low, k[1] + np.uint64(0xBB67AE85) & low]
    words: np.ndarray = np.choose((place & np.uint64(3)).astype(np.int64), c)
    return words.astype(np.int64)


FUNCTIONS: dict[str, Function] = {
    f.name: f
    for f in (
        Function("copy", "a", lambda a: a, "a", steady=True),
        Function("exp", "ark_exp(a)", np.exp),
        Function("log", "ark_log(a)", np.log),
        Function("expm1", "ark_expm1(a)", np.expm1),
        Function("log1p", "ark_log1p(a)", np.log1p, rounded="ark_log1p16(a)"),
        Function("softplus", "ark_softplus(a)", _softplus, rounded="ark_softplus16(a)"),
        Function("sqrt", "ark_sqrt(a)", np.sqrt),
        Function("rsqrt", "ark_rsqrt(a)", lambda a: 1.0 / np.sqrt(a)),
        Function("reciprocal", "(1.0f / a)", lambda a: 1.0 / a),
        Function("relu", "(a < 0.0f ? 0.0f : a)", lambda a: np.maximum(a, 0.0)),
        Function("gelu", "ark_gelu(a)", _gelu),
        Function("sigmoid", _logistic("a"), lambda a: 1 / (1 + np.exp(-a))),
        Function("silu", _SILU, lambda a: a / (1 + np.exp(-a)), rounded="ark_silu(a)"),
        Function(
            "swiglu",
            f"ark_times({_SILU}, b)",
            lambda a, b: a / (1 + np.exp(-a)) * b,
            rounded="ark_times(ark_silu(a), b)",
            gated=Gated(
                "silu(gate) * up, the gated activation of Shazeer 2020",
                ("[1.0, 2.0]", "[3.0, 4.0]", "[2.1932, 7.0464]"),
                (["mul", UP, _SILU_SLOPE], ["silu", X]),
                "silu",
            ),
        ),
        Function("add", "ark_plus(a, b)", np.add, "ark_plus(a, b)"),
        Function("sub", "ark_plus(a, -b)", np.subtract, _wrapping("a", "-", "b")),
        Function("rsub", "ark_plus(b, -a)", lambda a, b: b - a, _wrapping("b", "-", "a")),
        Function("mul", "ark_times(a, b)", np.multiply, "ark_times(a, b)", steady=True),
        Function("div", "(a / b)", np.divide, "ark_int_div(a, b)", steady=True),
        Function("rdiv", "(b / a)", lambda a, b: b / a, "ark_int_div(b, a)"),
        Function("pow", "ark_pow(a, b)", np.power, "ark_int_pow(a, b)"),
        Function(
            "floor_divide", "ark_floor_divide(a, b)", np.floor_divide, "ark_int_floor_divide(a, b)"
        ),
        Function("mod", "ark_mod(a, b)", np.mod, "ark_int_mod(a, b)"),
        Function("fmod", "ark_fmod(a, b)", np.fmod, "ark_int_fmod(a, b)"),
        # If either argument is NaN, the result is NaN, as in NumPy.
        Function("maximum", "(a > b || a != a ? a : b)", np.maximum, "ark_chosen(a > b ? a : b)"),
        Function("minimum", "(a < b || a != a ? a : b)", np.minimum, "ark_chosen(a < b ? a : b)"),
        Function("neg", "(-a)", np.negative, _wrapping("0", "-", "a"), steady=True),
        Function("abs", "(a < 0.0f ? -a : a)", np.abs, f"(a < 0 ? {_wrapping('0', '-', 'a')} : a)"),
        Function(
            "sign",
            "(a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a)",
            np.sign,
            "static_cast<INT>((a > 0) - (a < 0))",
        ),
        Function("floor", "ark_floor(a)", np.floor, "a"),
        Function("ceil", "(-ark_floor(-a))", np.ceil, "a"),
        Function("round", "ark_round(a)", np.round, "a"),
        Function("tanh", "ark_tanh(a)", np.tanh, rounded="ark_tanh16(a)", steady=True),
        Function("erf", "ark_erf(a)", _each(math.erf)),
        Function(
            "erfc",
            "ark_erfc(a)",
            _each(math.erfc),
            public=Public(
                "Complementary error function, 1 - erf(input)",
                ("[-1.0, 0.0, 2.0]", "[1.8427, 1.0000, 0.0047]"),
                ["mul", ["number", -2.0 / math.sqrt(math.pi)], ["exp", ["neg", _SQUARE]]],
                "erfc",
            ),
        ),
        Function(
            "log2",
            "ark_log2(a)",
            np.log2,
            public=Public(
                "Binary logarithm",
                ("[0.5, 1.0, 3.0]", "[-1.0000,  0.0000,  1.5850]"),
                ["mul", ["number", 1.0 / math.log(2.0)], ["reciprocal", X]],
                "log2",
                between=(0.5, 3.0),
            ),
        ),
        Function("sin", "ark_sin(a)", np.sin, rounded="ark_sin16(a, ark_rare)"),
        Function("cos", "ark_cos(a)", np.cos, rounded="ark_cos16(a, ark_rare)"),
        Function(
            "tan",
            "ark_tan(a)",
            np.tan,
            rounded="ark_tan16(a, ark_rare)",
            public=Public(
                "Tangent of radians",
                ("[-1.0, 0.0, 2.0]", "[-1.5574,  0.0000, -2.1850]"),
                ["add", ONE, ["mul", ["tan", X], ["tan", X]]],
                "tan",
                "Tan",
                (-1.0, 1.0),
            ),
        ),
        Function(
            "atan",
            "ark_atan(a)",
            np.arctan,
            rounded="ark_atan16(a)",
            public=Public(
                "Inverse tangent, in radians",
                ("[-1.0, 0.0, 2.0]", "[-0.7854,  0.0000,  1.1071]"),
                ["reciprocal", ["add", ONE, _SQUARE]],
                "atan",
                "Atan",
            ),
        ),
        Function("atan2", "ark_atan2(a, b)", np.arctan2),
        Function("hypot", "ark_hypot(a, b)", np.hypot),
        Function(
            "asin",
            "ark_asin(a)",
            np.arcsin,
            rounded="ark_asin16(a)",
            public=Public(
                "Inverse sine, in radians",
                ("[-0.5, 0.0, 0.5]", "[-0.5236,  0.0000,  0.5236]"),
                _ARC,
                "asin",
                "Asin",
                (-0.8, 0.8),
            ),
        ),
        Function(
            "acos",
            "ark_acos(a)",
            np.arccos,
            rounded="ark_acos16(a)",
            public=Public(
                "Inverse cosine, in radians",
                ("[-0.5, 0.0, 0.5]", "[2.0944, 1.5708, 1.0472]"),
                ["neg", _ARC],
                "acos",
                "Acos",
                (-0.8, 0.8),
            ),
        ),
        Function(
            "sinh",
            "ark_sinh(a)",
            np.sinh,
            rounded="ark_sinh16(a)",
            public=Public(
                "Hyperbolic sine",
                ("[-1.0, 0.0, 2.0]", "[-1.1752,  0.0000,  3.6269]"),
                ["cosh", X],
                "sinh",
                "Sinh",
            ),
        ),
        Function(
            "cosh",
            "ark_cosh(a)",
            np.cosh,
            rounded="ark_cosh16(a)",
            public=Public(
                "Hyperbolic cosine",
                ("[-1.0, 0.0, 2.0]", "[1.5431, 1.0000, 3.7622]"),
                ["sinh", X],
                "cosh",
                "Cosh",
            ),
        ),
        Function(
            "asinh",
            "ark_asinh(a)",
            np.arcsinh,
            rounded="ark_asinh16(a)",
            public=Public(
                "Inverse hyperbolic sine",
                ("[-1.0, 0.0, 2.0]", "[-0.8814,  0.0000,  1.4436]"),
                ["rsqrt", ["add", ONE, _SQUARE]],
                "asinh",
                "Asinh",
            ),
        ),
        Function(
            "acosh",
            "ark_acosh(a)",
            np.arccosh,
            public=Public(
                "Inverse hyperbolic cosine",
                ("[1.0, 2.0, 4.0]", "[0.0000, 1.3170, 2.0634]"),
                ["rsqrt", ["mul", ["sub", X, ONE], ["add", X, ONE]]],
                "acosh",
                "Acosh",
                (1.3, 3.0),
            ),
        ),
        Function(
            "atanh",
            "ark_atanh(a)",
            np.arctanh,
            public=Public(
                "Inverse hyperbolic tangent",
                ("[-0.5, 0.0, 0.5]", "[-0.5493,  0.0000,  0.5493]"),
                ["reciprocal", ["mul", ["sub", ONE, X], ["add", ONE, X]]],
                "atanh",
                "Atanh",
                (-0.8, 0.8),
            ),
        ),
        _compare("less", "<", np.less),
        _compare("less_equal", "<=", np.less_equal),
        _compare("greater", ">", np.greater),
        _compare("greater_equal", ">=", np.greater_equal),
        _compare("equal", "==", np.equal),
        _compare("not_equal", "!=", np.not_equal),
        Function("isnan", "(a != a)", np.isnan, predicate=True),
        Function("isinf", "(a == ark_inf() || a == -ark_inf())", np.isinf, predicate=True),
        Function("order", "ark_order(a)", _order, ordinal=True),
        _logical("logical_and", "(a && b)", np.logical_and),
        _logical("logical_or", "(a || b)", np.logical_or),
        _logical("logical_xor", "(a != b)", np.logical_xor),
        _logical("logical_not", "(!a)", np.logical_not),
        _bits("bitwise_and", "(a & b)", np.bitwise_and),
        _bits("bitwise_or", "(a | b)", np.bitwise_or),
        _bits("bitwise_xor", "(a ^ b)", np.bitwise_xor),
        _bits("bitwise_not", "(~a)", np.bitwise_not),
        _bits("shift_left", "ark_int_left(a, b)", np.left_shift),
        _bits("shift_right", "ark_int_right(a, b)", np.right_shift),
        Function("philox", "ark_philox(a, b, c)", _philox, "ark_philox(a, b, c)", floating=False),
        Function("where", "(a ? b : c)", np.where, "ark_chosen(a ? b : c)", steady=True),
    )
}
