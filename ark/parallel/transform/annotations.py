"""How each op may be split: its dimensions by letters, in the style of einops.

"m k+, n k+ -> m n" says that a matrix product can be cut along m and n, which gives parts of the
result, and along k, which gives partial sums of all of it. A letter with ^ is not cut: every
element along it is needed at once. A 1 is a dimension of one element that others broadcast over.
After nnScaler (Lin et al., OSDI 2024). Asked by ark.parallel.transform.pieces.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass

from ark.errors import ModelError, UnsupportedError
from ark.ir.graph import Node
from ark.tasks.functions import FUNCTIONS

LETTERS = string.ascii_lowercase


@dataclass(frozen=True)
class Annotation:
    """operands: for each input, and last the output, a letter a dimension ("1": broadcast).

    summed: letters along which parts are partial sums. frozen: letters that are not cut.
    """

    operands: tuple[tuple[str, ...], ...]
    summed: frozenset[str]
    frozen: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> Annotation:
        """Reads "m k+, n k+ -> m n"; ModelError for anything else."""
        left, arrow, right = text.partition("->")
        words = [part.split() for part in (*left.split(","), right)]
        if not arrow or not all(
            w[0] in LETTERS + "1" and w[1:] in ("", "+", "^") for p in words for w in p
        ):
            raise ModelError(f"{text!r} is no annotation; write letters as in 'm k+, n k+ -> m n'")
        marked = {(w[0], w[1:]) for part in words for w in part}
        return cls(
            tuple(tuple(w[0] for w in part) for part in words),
            frozenset(letter for letter, mark in marked if mark == "+"),
            frozenset(letter for letter, mark in marked if mark == "^"),
        )

    def __str__(self) -> str:
        def word(letter: str) -> str:
            return letter + "+" * (letter in self.summed) + "^" * (letter in self.frozen)

        parts = [" ".join(word(letter) for letter in part) for part in self.operands]
        return f"{', '.join(parts[:-1])} -> {parts[-1]}"


def annotate(node: Node) -> Annotation:
    """The annotation of a node; UnsupportedError for ops that have none."""
    rule = RULES.get(node.type, _pointwise if node.type in FUNCTIONS else None)
    if rule is None or "expr" in node.attrs or "shape" in node.attrs or len(node.outputs) != 1:
        raise UnsupportedError(
            f"{node.name} is a {node.type}, of which it is not known how to split it; such an op "
            "runs whole, on as many ranks as it is assigned to"
        )
    made = Annotation.parse(rule(node))
    assert all(
        len(letters) == len(t.shape)
        for letters, t in zip(made.operands, (*node.inputs, *node.outputs), strict=True)
    )
    return made


def _pointwise(node: Node) -> str:
    """Dimensions are matched from the last one, as NumPy broadcasts."""
    out = node.outputs[0].shape
    names = LETTERS[: len(out)]

    def letters(shape: tuple[int, ...]) -> str:
        own = zip(names[len(out) - len(shape) :], shape, out[len(out) - len(shape) :], strict=True)
        return " ".join("1" if n == 1 != m else name for name, n, m in own)

    return f"{', '.join(letters(t.shape) for t in node.inputs)} -> {' '.join(names)}"


def _matmul(node: Node) -> str:
    out = node.outputs[0].shape
    batch = LETTERS[: len(out) - 2]

    def letters(shape: tuple[int, ...], last: str) -> str:
        lead = batch[len(batch) - len(shape) + 2 :]
        sizes = zip(lead, shape, out[len(batch) - len(lead) :], strict=False)
        return " ".join([*("1" if n == 1 != m else name for name, n, m in sizes), last])

    a = letters(node.inputs[0].shape, "z+ x" if node.attrs["transpose_a"] else "x z+")
    b = letters(node.inputs[1].shape, "y z+" if node.attrs["transpose_b"] else "z+ y")
    return f"{a}, {b} -> {' '.join([*batch, 'x', 'y'])}"


def _rows(node: Node) -> str:
    """What needs whole rows: norms and softmax."""
    names = LETTERS[: len(node.outputs[0].shape)]
    row = " ".join([*names[:-1], names[-1] + "^"])
    scales = "".join(f", {names[-1]}^" for _ in node.inputs[1:])
    return f"{row}{scales} -> {row}"


def _reduce(node: Node) -> str:
    names, axis = (
        LETTERS[: len(node.inputs[0].shape)],
        node.attrs["axis"] % len(node.inputs[0].shape),
    )
    mark = "+" if node.type == "reduce_sum" else "^"
    left = " ".join(n + (mark if d == axis else "") for d, n in enumerate(names))
    kept = ["1" if d == axis else n for d, n in enumerate(names)]
    if not node.attrs["keepdims"]:
        del kept[axis]
    return f"{left} -> {' '.join(kept or ['1'])}"


def _transpose(node: Node) -> str:
    names = LETTERS[: len(node.inputs[0].shape)]
    return f"{' '.join(names)} -> {' '.join(names[p] for p in node.attrs['perm'])}"


def _embedding(node: Node) -> str:
    names = " ".join(LETTERS[: len(node.inputs[0].shape)])
    return f"{names}, y^ x -> {names} x"


RULES: dict[str, Callable[[Node], str]] = {
    "matmul": _matmul,
    "cast": _pointwise,
    "copy": _pointwise,
    "softmax": _rows,
    "layernorm": _rows,
    "rmsnorm": _rows,
    "reduce_sum": _reduce,
    "reduce_mean": _reduce,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
    "transpose": _transpose,
    "embedding": _embedding,
}
