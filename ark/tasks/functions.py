"""The elementwise functions: expression on the device and NumPy reference, one line each.

Adding an elementwise op is adding a line here. `a` and `b` are the inputs as float; the expression
uses the device ABI's math. Read by ark.ops.elementwise (the user's functions), by the elementwise
task kind, and by matmul epilogues.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


@dataclass(frozen=True)
class Function:
    """expr: C++ over a (and b). reference: the same in NumPy, float64 in and out.

    integer: the same over 32-bit integers (wrapping, division towards zero, nothing traps); none
    where the function is for floating point only.
    """

    name: str
    arity: int
    expr: str
    reference: Callable[..., np.ndarray]
    integer: str | None = None


def _wrapping(left: str, operator: str, right: str) -> str:
    words = f"static_cast<ark_u32>({left}) {operator} static_cast<ark_u32>({right})"
    return f"static_cast<ark_i32>({words})"


def _gelu(a: np.ndarray) -> np.ndarray:
    return 0.5 * a * (1.0 + np.tanh(SQRT_2_OVER_PI * (a + 0.044715 * a**3)))


FUNCTIONS: dict[str, Function] = {
    f.name: f
    for f in (
        Function("copy", 1, "a", lambda a: a, "a"),
        Function("exp", 1, "ark_exp(a)", np.exp),
        Function("sqrt", 1, "ark_sqrt(a)", np.sqrt),
        Function("rsqrt", 1, "ark_rsqrt(a)", lambda a: 1.0 / np.sqrt(a)),
        Function("relu", 1, "(a > 0.0f ? a : 0.0f)", lambda a: np.maximum(a, 0.0)),
        # 1 + tanh(x) = 2 / (1 + exp(-2 x))
        Function(
            "gelu",
            1,
            f"(a / (1.0f + ark_exp({-2 * SQRT_2_OVER_PI!r}f * (a + 0.044715f * a * a * a))))",
            _gelu,
        ),
        Function("sigmoid", 1, "(1.0f / (1.0f + ark_exp(-a)))", lambda a: 1 / (1 + np.exp(-a))),
        Function("silu", 1, "(a / (1.0f + ark_exp(-a)))", lambda a: a / (1 + np.exp(-a))),
        Function("add", 2, "(a + b)", np.add, _wrapping("a", "+", "b")),
        Function("sub", 2, "(a - b)", np.subtract, _wrapping("a", "-", "b")),
        Function("rsub", 2, "(b - a)", lambda a, b: b - a, _wrapping("b", "-", "a")),
        Function("mul", 2, "(a * b)", np.multiply, _wrapping("a", "*", "b")),
        Function("div", 2, "(a / b)", np.divide, "ark_int_div(a, b)"),
        Function("rdiv", 2, "(b / a)", lambda a, b: b / a, "ark_int_div(b, a)"),
    )
}
