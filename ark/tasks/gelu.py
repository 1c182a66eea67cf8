"""Recognises GELU in an expression, written out by its definition or by its approximation with
tanh, and the derivative of its definition. The device computes them as one function, with a third
of the instructions or fewer. Called by the writer of expressions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Tree = Sequence[Any]
NUMBER_TOLERANCE = 1e-6  # relative tolerance: constants may have been rounded to fp32
CUBIC_COEFFICIENT = 0.044715  # of x^3 in the approximation with tanh
DENSITY_SCALE = 1.0 / math.sqrt(2.0 * math.pi)  # the normal distribution's density at 0


@dataclass(frozen=True)
class Gelu:
    """A GELU, or its derivative, that was recognised. argument: the tree to which it is applied.
    function: the name of the device function.
    """

    function: str
    argument: Tree


def gelu_of(tree: Tree) -> Gelu | None:
    """The GELU that a checked tree computes: x / 2 * (1 + erf(x / sqrt(2))), or x / 2 * (1 +
    tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), with the factors in any order. Also the derivative of
    the first form, (1 + erf(x / sqrt(2))) / 2 + x e^(-x^2 / 2) / sqrt(2 pi). None for other trees.
    """
    if tree[0] == "add":
        return next(filter(None, (_slope(*pair) for pair in _orders(tree))), None)
    if tree[0] != "mul":
        return None
    for first, second in _orders(tree):
        gelu = _twice_normal(second)
        if gelu is not None and _is_half_of(first, gelu.argument):
            return gelu
        if second[0] != "mul":
            continue
        for third, fourth in _orders(second):
            gelu = _twice_normal(fourth)
            if gelu is None:
                continue
            halves = itertools.permutations((first, third))
            if any(_is(a, 0.5) and b == gelu.argument for a, b in halves):
                return gelu
    return None


def _slope(first: Tree, second: Tree) -> Gelu | None:
    """The derivative of GELU that the sum of two trees computes: `first` is the normal distribution
    function of x, and `second` is x times its density.
    """
    if first[0] != "mul":
        return None
    halves = (normal for half, normal in _orders(first) if _is(half, 0.5))
    gelu = next(filter(None, map(_twice_normal, halves)), None)
    if gelu is None or gelu.function != "ark_gelu_erf":
        return None
    x = gelu.argument
    factors = list(_factors(second, (x,)))
    numbers = [f[1] for f in factors if f[0] == "number"]
    powers = [f for f in factors if f[0] == "exp"]
    rest = [f for f in factors if f[0] not in ("number", "exp")]
    scaled = math.isclose(math.prod(numbers), DENSITY_SCALE, rel_tol=NUMBER_TOLERANCE)
    if not scaled or rest != [x] or len(powers) != 1 or not _is_half_square(powers[0][1], x):
        return None
    return Gelu("ark_gelu_erf_slope", x)


def _is_half_square(tree: Tree, x: Tree) -> bool:
    """True for -x^2 / 2, also where both factors are x / sqrt(2)."""
    if tree[0] != "neg":
        return False
    factors = list(_factors(tree[1], (x,)))
    numbers = [f[1] for f in factors if f[0] == "number"]
    rest = [f for f in factors if f[0] != "number"]
    return rest == [x, x] and math.isclose(math.prod(numbers), 0.5, rel_tol=NUMBER_TOLERANCE)


def _orders(tree: Tree) -> Iterator[tuple[Tree, Tree]]:
    yield tree[1], tree[2]
    yield tree[2], tree[1]


def _is(tree: Tree, value: float) -> bool:
    return tree[0] == "number" and math.isclose(tree[1], value, rel_tol=NUMBER_TOLERANCE)


def _is_half_of(tree: Tree, whole: Tree) -> bool:
    if tree[0] == "div":
        return tree[1] == whole and _is(tree[2], 2.0)
    return tree[0] == "mul" and any(_is(a, 0.5) and b == whole for a, b in _orders(tree))


def _twice_normal(tree: Tree) -> Gelu | None:
    """Recognises twice the normal distribution function: if the tree is 1 + erf(x / sqrt(2)) or its
    approximation with tanh, returns the GELU of x.
    """
    if tree[0] != "add":
        return None
    for one, rest in _orders(tree):
        if not _is(one, 1.0) or rest[0] not in ("erf", "tanh"):
            continue
        argument = (_over_root if rest[0] == "erf" else _over_cubic)(rest[1])
        if argument is not None:
            return Gelu("ark_gelu_erf" if rest[0] == "erf" else "ark_gelu", argument)
    return None


def _over_root(inner: Tree) -> Tree | None:
    """Recognises x / sqrt(2): returns x if the tree has this form, otherwise None."""
    if inner[0] == "div" and _is(inner[2], math.sqrt(2.0)):
        argument: Tree = inner[1]
        return argument
    if inner[0] == "mul":
        return next((b for a, b in _orders(inner) if _is(a, math.sqrt(0.5))), None)
    return None


def _over_cubic(inner: Tree) -> Tree | None:
    """Recognises sqrt(2 / pi) * (x + 0.044715 x^3) and sqrt(2 / pi) * x * (1 + 0.044715 x^2):
    returns x if the tree has one of these forms, otherwise None.
    """
    sums = [part for part in _factors(inner) if part[0] == "add"]
    scale = math.sqrt(2.0 / math.pi)
    for total in sums:
        for first, second in _orders(total):
            if _is_power(second, first, CUBIC_COEFFICIENT, 3) and _is_power(inner, total, scale, 1):
                return first
            others = [p for p in _factors(inner) if p is not total and p[0] != "number"]
            if not _is(first, 1.0) or len(others) != 1:
                continue
            (x,) = others
            if _is_power(second, x, CUBIC_COEFFICIENT, 2) and _is_product(inner, scale, [x, total]):
                return x
    return None


def _is_power(tree: Tree, x: Tree, scale: float, exponent: int) -> bool:
    """True for scale * x^exponent."""
    return _is_product(tree, scale, [x] * exponent)


def _is_product(tree: Tree, scale: float, parts: list[Tree]) -> bool:
    """True if the tree is the product of the number `scale` and the given parts."""
    factors = list(_factors(tree, parts))
    numbers = [f for f in factors if _is(f, scale)]
    rest = [f for f in factors if not _is(f, scale)]
    return (
        len(numbers) == 1
        and len(rest) == len(parts)
        and all(rest.count(part) == parts.count(part) for part in parts)
    )


def _factors(tree: Tree, whole: Sequence[Tree] = ()) -> Iterator[Tree]:
    """The factors of nested products. Powers of 2 and 3 are several factors. The trees in `whole`
    are not divided.
    """
    if tree[0] == "mul" and tree not in whole:
        yield from itertools.chain(_factors(tree[1], whole), _factors(tree[2], whole))
        return
    if tree[0] == "pow" and tree not in whole:
        for exponent in (2, 3):
            if _is(tree[2], float(exponent)):
                for _ in range(exponent):
                    yield from _factors(tree[1], whole)
                return
    yield tree
