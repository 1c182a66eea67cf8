"""The elementwise functions: expression on the device and NumPy reference, one line each.

Adding an elementwise op is adding a line here. `a` and `b` are the inputs as float; the expression
uses the device ABI's math. Read by ark.ops.elementwise (the user's functions), by
ark.tasks.expression, which writes trees of them.
"""

from __future__ import annotations

import math
import re
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
    expr: str
    reference: Callable[..., np.ndarray]
    integer: str | None = None

    @property
    def arity(self) -> int:
        """How many inputs the expression uses."""
        return 2 if re.search(r"\bb\b", self.expr) else 1


def _wrapping(left: str, operator: str, right: str) -> str:
    words = f"static_cast<ark_u32>({left}) {operator} static_cast<ark_u32>({right})"
    return f"static_cast<ark_i32>({words})"


def _gelu(a: np.ndarray) -> np.ndarray:
    return 0.5 * a * (1.0 + np.tanh(SQRT_2_OVER_PI * (a + 0.044715 * a**3)))


def _logistic(value: str) -> str:
    """1 / (1 + exp(-value)), whose reciprocal may be good to a unit in the last place only."""
    return f"ark_reciprocal(1.0f + ark_exp(-{value}))"


# 1 + tanh(x) = 2 / (1 + exp(-2 x))
_GELU = f"({2 * SQRT_2_OVER_PI!r}f * (a + 0.044715f * a * a * a))"

FUNCTIONS: dict[str, Function] = {
    f.name: f
    for f in (
        Function("copy", "a", lambda a: a, "a"),
        Function("exp", "ark_exp(a)", np.exp),
        Function("sqrt", "ark_sqrt(a)", np.sqrt),
        Function("rsqrt", "ark_rsqrt(a)", lambda a: 1.0 / np.sqrt(a)),
        Function("relu", "(a > 0.0f ? a : 0.0f)", lambda a: np.maximum(a, 0.0)),
        Function("gelu", f"(a * {_logistic(_GELU)})", _gelu),
        Function("sigmoid", _logistic("a"), lambda a: 1 / (1 + np.exp(-a))),
        Function("silu", f"(a * {_logistic('a')})", lambda a: a / (1 + np.exp(-a))),
        Function("swiglu", f"(a * {_logistic('a')} * b)", lambda a, b: a / (1 + np.exp(-a)) * b),
        Function("add", "(a + b)", np.add, _wrapping("a", "+", "b")),
        Function("sub", "(a - b)", np.subtract, _wrapping("a", "-", "b")),
        Function("rsub", "(b - a)", lambda a, b: b - a, _wrapping("b", "-", "a")),
        Function("mul", "(a * b)", np.multiply, _wrapping("a", "*", "b")),
        Function("div", "(a / b)", np.divide, "ark_int_div(a, b)"),
        Function("rdiv", "(b / a)", lambda a, b: b / a, "ark_int_div(b, a)"),
    )
}
