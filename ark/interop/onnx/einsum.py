"""Converts Einsum to diagonals, sums and matrix products of two operands at a time. Called through
the table of operators.
"""

from __future__ import annotations

import math
import string
from typing import Any

import ark
from ark.errors import ModelError
from ark.interop.onnx.values import Call, Value, operator, shaped


@operator("Einsum")
def _einsum(call: Call) -> Value:
    shapes = [call.shape(i) for i in range(len(call.inputs))]
    terms, result = _letters(call.attribute("equation", ""), [len(s) for s in shapes])
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for letter, n in zip(term, shape, strict=True):
            if sizes.setdefault(letter, n) == 1:
                sizes[letter] = n
            elif n not in (1, sizes[letter]):
                raise ModelError(
                    f"the letter {letter!r} stands for dimensions of {sizes[letter]} and {n} "
                    "elements; they must be equal"
                )
    operands = [
        _diagonal(call.tensor(i), term, shape)
        for i, (term, shape) in enumerate(zip(terms, shapes, strict=True))
    ]
    term, tensor = operands[0]
    for place, (other, factor) in enumerate(operands[1:], 1):
        later = set(result).union(*(t for t, _ in operands[place + 1 :]))
        term, tensor = _product((term, tensor), (other, factor), later, sizes)
    summed = [d for d, letter in enumerate(term) if letter not in result]
    if summed:
        tensor = ark.reduce_sum(tensor, summed)
        term = "".join(letter for letter in term if letter in result)
        tensor = ark.reshape(tensor, [sizes[letter] for letter in term] or [1])
    if sorted(term) != sorted(result):
        raise ModelError(
            f"the result has the letters {result!r}, but the operands have {term!r}; they must be "
            "the same"
        )
    if term != result:
        tensor = ark.transpose(tensor, [term.index(letter) for letter in result])
    return shaped(tensor, [sizes[letter] for letter in result])


def _letters(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """The letters of every operand and of the result, with '...' replaced by letters."""
    equation = equation.replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise ModelError(
            f"{equation!r} has {len(terms)} operands, but the node has {len(ranks)} inputs"
        )
    free = [c for c in string.ascii_letters if c not in equation]
    most = max(
        [r - len(t.replace("...", "")) for t, r in zip(terms, ranks, strict=True) if "..." in t],
        default=0,
    )
    dots = "".join(free[:most])
    wide = []
    for term, rank in zip(terms, ranks, strict=True):
        count = rank - len(term.replace("...", ""))
        wide.append(term.replace("...", dots[most - count :] if count > 0 else ""))
        if len(wide[-1]) != rank:
            raise ModelError(f"the letters {term!r} do not fit an operand of {rank} dimensions")
    if arrow:
        return wide, right.replace("...", dots)
    every = "".join(wide)
    return wide, dots + "".join(sorted(c for c in set(every) - set(dots) if every.count(c) == 1))


def _diagonal(tensor: Any, term: str, shape: tuple[int, ...]) -> tuple[str, Any]:
    """The operand with each letter once. If a letter occurs twice in its term, as in "ii", the
    diagonal of the two dimensions is taken.
    """
    sizes = list(shape)
    for letter in sorted(set(term)):
        while term.count(letter) > 1:
            i = term.index(letter)
            j = term.index(letter, i + 1)
            if sizes[i] != sizes[j]:
                raise ModelError(
                    f"the letter {letter!r} stands for dimensions of {sizes[i]} and {sizes[j]} "
                    "elements; they must be equal"
                )
            order = [d for d in range(len(term)) if d not in (i, j)] + [i, j]
            n, rest = sizes[i], [sizes[d] for d in order[:-2]]
            flat = ark.reshape(ark.transpose(tensor, order), [math.prod(rest), n * n])
            steps = ark.strided_slice(flat, [0, 0], [math.prod(rest), n], [1, n + 1])
            term = "".join(term[d] for d in order[:-1])
            sizes = [*rest, n]
            tensor = ark.reshape(steps, sizes)
    return term, tensor


def _product(
    left: tuple[str, Any], right: tuple[str, Any], later: set[str], sizes: dict[str, int]
) -> tuple[str, Any]:
    """The product of two operands, as a batch of matrix products. Letters that neither the result
    nor later operands use are summed.
    """
    (a, x), (b, y) = (
        _only(t, v, other, later) for (t, v), (other, _) in [(left, right), (right, left)]
    )
    shared = [c for c in a if c in b]
    batch = [c for c in shared if c in later]
    inner = [c for c in shared if c not in later]
    rows, columns = [c for c in a if c not in b], [c for c in b if c not in a]
    if not all(_dim(a, x, c) == _dim(b, y, c) for c in shared):
        x, y = (
            ark.expand(v, [sizes[c] if c in shared else _dim(t, v, c) for c in t])
            for t, v in ((a, x), (b, y))
        )
    count = {
        c: sizes[c] if c in shared else _dim(a if c in a else b, x if c in a else y, c)
        for c in dict.fromkeys(a + b)
    }

    def shaped(
        term: str, tensor: Any, order: list[str], second: list[str], third: list[str]
    ) -> Any:
        where = [term.index(c) for c in order + second + third]
        tensor = ark.transpose(tensor, where) if len(where) > 1 else tensor
        parts = [math.prod(count[c] for c in part) for part in (order, second, third)]
        return ark.reshape(tensor, parts)

    product = ark.matmul(shaped(a, x, batch, rows, inner), shaped(b, y, batch, inner, columns))
    term = "".join(batch + rows + columns)
    return term, ark.reshape(product, [count[c] for c in term] or [1])


def _dim(term: str, tensor: Any, letter: str) -> int:
    return int(tensor.ir.shape[term.index(letter)])


def _only(term: str, tensor: Any, other: str, later: set[str]) -> tuple[str, Any]:
    """The operand, summed over the dimensions whose letters occur neither in the other operand nor
    in the letters that are used later.
    """
    summed = [d for d, c in enumerate(term) if c not in other and c not in later]
    if not summed:
        return term, tensor
    kept = [d for d in range(len(term)) if d not in summed]
    shape = [tensor.ir.shape[d] for d in kept]
    return "".join(term[d] for d in kept), ark.reshape(ark.reduce_sum(tensor, summed), shape or [1])
