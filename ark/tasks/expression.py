"""Expression trees: what a chain of elementwise ops computes for one element.

A tree is nested lists, as JSON has them: `["input", i]` is operand i's element, `["number", x]` a
constant, `["cast", dtype, tree]` a value rounded to a type, and `[function, tree, ...]` a function
of ark.tasks.functions. Floating point is fp32 between the functions; where all arguments are
integers so is the result. Trees come from the lowering or from a plan file: a name is looked up, a
number is printed as a number, so that nothing of a file becomes code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ark.errors import PlanError
from ark.ir.dtype import by_name
from ark.tasks.functions import FUNCTIONS

Tree = Sequence[Any]

INTEGERS = ("int32", "uint32", "int8", "uint8", "byte")
MAX_NODES = 64
_CASTS = ("fp32", "fp16", "bf16", *INTEGERS)


def leaf(index: int) -> list[Any]:
    """Operand `index`."""
    return ["input", index]


def number(value: float) -> list[Any]:
    """A constant."""
    return ["number", float(value)]


def size(tree: Tree) -> int:
    """Nodes of a checked tree."""
    return 1 + sum(size(part) for part in _children(tree))


def _children(tree: Tree) -> Sequence[Tree]:
    if tree[0] in ("input", "number"):
        return ()
    return tree[2:] if tree[0] == "cast" else tree[1:]


def check(tree: Any, dtypes: Sequence[str]) -> None:
    """Refuses what is no expression over operands of these types; PlanError says which part."""
    left = [MAX_NODES]
    _check(tree, dtypes, left)


def _check(tree: Any, dtypes: Sequence[str], left: list[int]) -> bool:
    """Is the part's value an integer?"""
    left[0] -= 1
    if left[0] < 0:
        raise PlanError(f"an expression has more than {MAX_NODES} parts")
    if not isinstance(tree, list | tuple) or len(tree) < 2 or not isinstance(tree[0], str):
        raise PlanError(f"{tree!r:.80} is no expression; expected [function, argument, ...]")
    head, *rest = tree
    if head == "input":
        known = len(rest) == 1 and type(rest[0]) is int and 0 <= rest[0] < len(dtypes)
        if not known:
            raise PlanError(f"an expression reads {rest!r:.40}, but there are {len(dtypes)} inputs")
        return dtypes[rest[0]] in INTEGERS
    if head == "number":
        known = len(rest) == 1 and type(rest[0]) in (int, float)
        if not known or (type(rest[0]) is int and abs(rest[0]) >= 1 << 64):
            raise PlanError(f"an expression has {rest!r:.40} where a number is expected")
        return all(d in INTEGERS for d in dtypes)
    if head == "cast":
        if len(rest) != 2 or rest[0] not in _CASTS:
            raise PlanError(f"an expression casts to {rest!r:.40}; expected one of {_CASTS}")
        _check(rest[1], dtypes, left)
        return rest[0] in INTEGERS
    if head not in FUNCTIONS or FUNCTIONS[head].arity != len(rest):
        raise PlanError(
            f"an expression calls {head!r:.40} with {len(rest)} arguments; the functions are "
            f"{', '.join(sorted(FUNCTIONS))}"
        )
    whole = [_check(part, dtypes, left) for part in rest]
    if all(whole) and FUNCTIONS[head].integer is None:
        raise PlanError(f"{head} of integers is not built; cast them to floating point")
    return all(whole)


def substitute(tree: Tree, inputs: Sequence[Tree]) -> list[Any]:
    """The tree with `inputs[i]` in the place of operand i."""
    if tree[0] == "input":
        return list(inputs[tree[1]])
    if tree[0] == "number":
        return list(tree)
    skip = 2 if tree[0] == "cast" else 1
    return [*tree[:skip], *(substitute(part, inputs) for part in tree[skip:])]


def evaluate(tree: Tree, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """The tree in NumPy, in float64 (or integers), for tests and references."""
    if tree[0] == "input":
        return inputs[tree[1]]
    if tree[0] == "number":
        return np.asarray(tree[1])
    values = [evaluate(part, inputs) for part in _children(tree)]
    if tree[0] == "cast":
        kind = by_name(tree[1]).numpy
        if tree[1] in INTEGERS:
            return np.trunc(values[0]).astype(np.int64).astype(kind)
        return values[0].astype(kind).astype(np.float64)
    return FUNCTIONS[tree[0]].reference(*values)


class Writer:
    """Writes a tree as C++ statements, one local constant for each part."""

    def __init__(self, leaves: Sequence[tuple[str, str]], literal: Any) -> None:
        """leaves: (text of the element's value, its C type) by operand."""
        self._leaves = leaves
        self._literal = literal
        self.statements: list[str] = []

    def write(self, tree: Tree) -> tuple[str, str]:
        """(text, C type) of the tree's value; adds what comes before to `statements`."""
        if tree[0] == "input":
            return self._leaves[tree[1]]
        if tree[0] == "number":
            return self._number(float(tree[1]))
        values = [self.write(part) for part in _children(tree)]
        if tree[0] == "cast":
            return self._cast(values[0], tree[1])
        function = FUNCTIONS[tree[0]]
        whole = all(kind != "float" for _, kind in values) and function.integer is not None
        compute = "ark_i32" if whole else "float"
        names = {
            letter: self._named(compute, _as(value, compute))
            for letter, value in zip("ab", values, strict=False)
        }
        text = (function.integer if whole else None) or function.expr
        return self._let(compute, re.sub(r"\b[ab]\b", lambda m: names[m.group()], text)), compute

    def _number(self, value: float) -> tuple[str, str]:
        """A number is an integer only where that loses nothing; beside floats it becomes one."""
        if value.is_integer() and abs(value) < 2**31 and self._integers():
            # The least integer has no literal of its own.
            return f"static_cast<ark_i32>({int(value)}ll)", "ark_i32"
        return self._literal(value), "float"

    def _integers(self) -> bool:
        return all(kind != "float" for _, kind in self._leaves)

    def _cast(self, value: tuple[str, str], name: str) -> tuple[str, str]:
        if name in INTEGERS:
            ctype = by_name(name).storage
            return self._let(ctype, f"static_cast<{ctype}>({value[0]})"), ctype
        text = _as(value, "float")
        if name == "fp32":
            return text, "float"
        rounding = "ark_half" if name == "fp16" else "ark_bfloat"
        return self._let("float", f"ark_float({rounding}({text}))"), "float"

    def _named(self, ctype: str, text: str) -> str:
        """A name for a value that a function may use more than once."""
        return text if re.fullmatch(r"x\d+", text) else self._let(ctype, text)

    def _let(self, ctype: str, text: str) -> str:
        name = f"x{len(self.statements)}"
        self.statements.append(f"const {ctype} {name} = {text};")
        return name


def _as(value: tuple[str, str], ctype: str) -> str:
    return value[0] if value[1] == ctype else f"static_cast<{ctype}>({value[0]})"
