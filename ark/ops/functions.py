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
    """expr: C++ over a (and b). reference: the same in NumPy, float64 in and out."""

    name: str
    arity: int
    expr: str
    reference: Callable[..., np.ndarray]


def _gelu(a: np.ndarray) -> np.ndarray:
    return 0.5 * a * (1.0 + np.tanh(SQRT_2_OVER_PI * (a + 0.044715 * a**3)))


FUNCTIONS: dict[str, Function] = {
    f.name: f
    for f in (
        Function("copy", 1, "a", lambda a: a),
        Function("exp", 1, "ark_exp(a)", np.exp),
        Function("sqrt", 1, "ark_sqrt(a)", np.sqrt),
        Function("rsqrt", 1, "ark_rsqrt(a)", lambda a: 1.0 / np.sqrt(a)),
        Function("relu", 1, "(a > 0.0f ? a : 0.0f)", lambda a: np.maximum(a, 0.0)),
        Function(
            "gelu",
            1,
            f"(0.5f * a * (1.0f + ark_tanh({SQRT_2_OVER_PI!r}f * (a + 0.044715f * a * a * a))))",
            _gelu,
        ),
        Function("sigmoid", 1, "(1.0f / (1.0f + ark_exp(-a)))", lambda a: 1 / (1 + np.exp(-a))),
        Function("silu", 1, "(a / (1.0f + ark_exp(-a)))", lambda a: a / (1 + np.exp(-a))),
        Function("add", 2, "(a + b)", np.add),
        Function("sub", 2, "(a - b)", np.subtract),
        Function("mul", 2, "(a * b)", np.multiply),
        Function("div", 2, "(a / b)", np.divide),
    )
}
