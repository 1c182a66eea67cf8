"""Recognises the definition of GELU in an expression. The device computes it as one function, with
a third of the instructions. Called by the writer of expressions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

Tree = Sequence[Any]
NUMBER_TOLERANCE = 1e-6  # relative tolerance: constants may have been rounded to fp32


def gelu_argument(tree: Tree) -> Tree | None:
    """If a checked tree is x / 2 * (1 + erf(x / sqrt(2))), with the factors in any order, its part
    x; otherwise None.
    """
    if tree[0] != "mul":
        return None
    for first, second in _orders(tree):
        argument = _twice_normal(second)
        if argument is not None and _is_half_of(first, argument):
            return argument
        if second[0] != "mul":
            continue
        for third, fourth in _orders(second):
            argument = _twice_normal(fourth)
            if argument is None:
                continue
            halves = itertools.permutations((first, third))
            if any(_is(a, 0.5) and b == argument for a, b in halves):
                return argument
    return None


def _orders(tree: Tree) -> Iterator[tuple[Tree, Tree]]:
    yield tree[1], tree[2]
    yield tree[2], tree[1]


def _is(tree: Tree, value: float) -> bool:
    return tree[0] == "number" and math.isclose(tree[1], value, rel_tol=NUMBER_TOLERANCE)


def _is_half_of(tree: Tree, whole: Tree) -> bool:
    if tree[0] == "div":
        return tree[1] == whole and _is(tree[2], 2.0)
    return tree[0] == "mul" and any(_is(a, 0.5) and b == whole for a, b in _orders(tree))


def _twice_normal(tree: Tree) -> Tree | None:
    """If the tree is 1 + erf(x / sqrt(2)), its part x; otherwise None."""
    if tree[0] != "add":
        return None
    for one, error in _orders(tree):
        if not _is(one, 1.0) or error[0] != "erf":
            continue
        inner: Tree = error[1]
        if inner[0] == "div" and _is(inner[2], math.sqrt(2.0)):
            argument: Tree = inner[1]
            return argument
        if inner[0] == "mul":
            return next((b for a, b in _orders(inner) if _is(a, math.sqrt(0.5))), None)
    return None
