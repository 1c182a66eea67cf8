"""Differentiates expression trees (ark.tasks.expression). The derivative with respect to an operand
is again a tree.

For each function, the table DERIVATIVES has its partial derivatives, as trees of the function's
arguments (operands 0, 1, 2). Called by the rule of elementwise ops; checked against torch in
tests/backend/test_gradients.py.
"""

from __future__ import annotations

import math

from ark.ir.dtype import INTEGERS
from ark.tasks.expression import Tree, leaf, number, substitute
from ark.tasks.functions import FUNCTIONS
from ark.tasks.gelu import CUBIC_COEFFICIENT, gelu_of

A, B = leaf(0), leaf(1)
ZERO, ONE = number(0.0), number(1.0)


def add(x: Tree, y: Tree) -> Tree:
    """The tree for x + y. If x or y is the constant 0, the other one is returned."""
    if x == ZERO:
        return y
    return x if y == ZERO else ["add", x, y]


def mul(x: Tree, y: Tree) -> Tree:
    """The tree for x * y, simplified if x or y is the constant 0 or 1."""
    if ZERO in (x, y):
        return ZERO
    if x == ONE:
        return y
    return x if y == ONE else ["mul", x, y]


def _neg(x: Tree) -> Tree:
    return ["neg", x]


def _square(x: Tree) -> Tree:
    return ["mul", x, x]


def _share(chosen: str) -> tuple[Tree, Tree]:
    """The derivatives of maximum or minimum with respect to both arguments. The derivative is 1 for
    the argument that is the result and 0 for the other one; if the arguments are equal, it is 1/2
    for each. chosen: the comparison that is true if the first argument is the result.
    """
    half: Tree = ["where", ["equal", A, B], number(0.5), ZERO]
    return (
        ["where", [chosen, A, B], ONE, half],
        ["where", [chosen, B, A], ONE, half],
    )


_SIGMOID = ["sigmoid", A]
_SILU = ["mul", _SIGMOID, ["add", ONE, ["mul", A, ["sub", ONE, _SIGMOID]]]]
# GELU with tanh is A sigmoid(u), where u = A (_GELU_FIRST + _GELU_THIRD A^2).
_GELU_FIRST = 2.0 * math.sqrt(2.0 / math.pi)
_GELU_THIRD = _GELU_FIRST * CUBIC_COEFFICIENT
_GATE: Tree = [
    "sigmoid",
    ["mul", A, ["add", number(_GELU_FIRST), ["mul", number(_GELU_THIRD), _square(A)]]],
]
_GELU = [
    "mul",
    _GATE,
    [
        "add",
        ONE,
        [
            "mul",
            ["mul", A, ["sub", ONE, _GATE]],
            ["add", number(_GELU_FIRST), ["mul", number(3 * _GELU_THIRD), _square(A)]],
        ],
    ],
]
# The derivative of a power with respect to its exponent is taken as 0 if the base is not positive.
_LOG = ["where", ["greater", A, ZERO], ["log", ["maximum", A, number(1e-38)]], ZERO]

DERIVATIVES: dict[str, tuple[Tree, ...]] = {
    "copy": (ONE,),
    "exp": (["exp", A],),
    "log": (["reciprocal", A],),
    "expm1": (["exp", A],),
    "log1p": (["reciprocal", ["add", ONE, A]],),
    "softplus": (_SIGMOID,),
    "sqrt": (["div", number(0.5), ["sqrt", A]],),
    "rsqrt": (["mul", number(-0.5), ["div", ["rsqrt", A], A]],),
    "reciprocal": (_neg(["reciprocal", _square(A)]),),
    "relu": (["where", ["greater", A, ZERO], ONE, ZERO],),
    "gelu": (_GELU,),
    "sigmoid": (["mul", _SIGMOID, ["sub", ONE, _SIGMOID]],),
    "silu": (_SILU,),
    "add": (ONE, ONE),
    "sub": (ONE, number(-1.0)),
    "rsub": (number(-1.0), ONE),
    "mul": (B, A),
    "div": (["reciprocal", B], _neg(["div", A, _square(B)])),
    "rdiv": (_neg(["div", B, _square(A)]), ["reciprocal", A]),
    "pow": (
        ["mul", B, ["pow", A, ["sub", B, ONE]]],
        ["mul", ["pow", A, B], _LOG],
    ),
    "floor_divide": (ZERO, ZERO),
    "mod": (ONE, _neg(["floor", ["div", A, B]])),
    "fmod": (ONE, _neg(["div", ["sub", A, ["fmod", A, B]], B])),
    "maximum": _share("greater"),
    "minimum": _share("less"),
    "neg": (number(-1.0),),
    "abs": (["sign", A],),
    "tanh": (["sub", ONE, _square(["tanh", A])],),
    "erf": (["mul", number(2 / math.sqrt(math.pi)), ["exp", _neg(_square(A))]],),
    "sin": (["cos", A],),
    "cos": (_neg(["sin", A]),),
    "atan2": (
        ["div", B, ["add", _square(A), _square(B)]],
        _neg(["div", A, ["add", _square(A), _square(B)]]),
    ),
    "hypot": (["div", A, ["hypot", A, B]], ["div", B, ["hypot", A, B]]),
    "sign": (ZERO,),
    "floor": (ZERO,),
    "ceil": (ZERO,),
    "round": (ZERO,),
}
DERIVATIVES |= {f.name: (f.public.slope,) for f in FUNCTIONS.values() if f.public is not None}
DERIVATIVES |= {f.name: f.gated.slopes for f in FUNCTIONS.values() if f.gated is not None}

STEPS = (
    "less",
    "less_equal",
    "greater",
    "greater_equal",
    "equal",
    "not_equal",
    "isnan",
    "isinf",
    "logical_and",
    "logical_or",
    "logical_xor",
    "logical_not",
    "order",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bitwise_not",
    "philox",
    "shift_left",
    "shift_right",
)
"""The functions with the derivative 0, because their values are bools or integers."""


def partials(tree: Tree) -> list[tuple[int, Tree]]:
    """The derivatives of a tree's outermost function with respect to its arguments.

    Returns pairs (index of the argument in the tree, derivative). Arguments that are conditions or
    limits, to which no gradient flows, are omitted.
    """
    head, *arguments = tree
    if head in ("input", "number", "index") or head in STEPS:
        return []
    if head == "cast":
        return [] if tree[1] in _WHOLE else [(2, ONE)]
    if head == "where":
        return [
            (2, ["where", arguments[0], ONE, ZERO]),
            (3, ["where", arguments[0], ZERO, ONE]),
        ]
    fixed = [i for i, part in enumerate(arguments) if not reads(part)]
    if head in ("maximum", "minimum") and len(fixed) == 1:  # a limit: equal values are within
        other = 1 - fixed[0]
        within = "greater_equal" if head == "maximum" else "less_equal"
        return [(1 + other, ["where", [within, arguments[other], arguments[fixed[0]]], ONE, ZERO])]
    return [(1 + i, substitute(slope, arguments)) for i, slope in enumerate(DERIVATIVES[head])]


_WHOLE = (*(t.name for t in INTEGERS), "bool")


def reads(tree: Tree, operand: int | None = None) -> bool:
    """True if the tree reads operand number `operand`, or any operand if none is given."""
    if tree[0] == "input":
        return operand is None or tree[1] == operand
    if tree[0] in ("number", "index"):
        return False
    return any(reads(part, operand) for part in (tree[2:] if tree[0] == "cast" else tree[1:]))


def derivative(tree: Tree, operand: int) -> Tree:
    """The derivative of a tree with respect to an operand, which must be floating point."""
    if tree[0] == "input":
        return ONE if tree[1] == operand else ZERO
    gelu = gelu_of(tree)
    if gelu is not None and gelu.function == "ark_gelu":
        inner = derivative(gelu.argument, operand)
        return _through(substitute(_GELU, [gelu.argument]), inner)
    total: Tree = ZERO
    for place, slope in partials(tree):
        if reads(tree[place], operand):
            total = add(total, _through(slope, derivative(tree[place], operand)))
    return total


def _through(slope: Tree, inner: Tree) -> Tree:
    """The tree for slope * inner (chain rule).

    If the slope is 1 or 0 depending on a condition, the tree selects `inner` or 0 instead of
    multiplying, because the product 0 * inf would be NaN.
    """
    if slope[0] == "where" and slope[2:] == [ONE, ZERO] and inner != ZERO:
        return ["where", slope[1], inner, ZERO]
    if slope[0] == "where" and slope[2:] == [ZERO, ONE] and inner != ZERO:
        return ["where", slope[1], ZERO, inner]
    return mul(slope, inner)
