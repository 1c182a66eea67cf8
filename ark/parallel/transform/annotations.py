"""How each op may be split: its dimensions as letters, in the style of einops.

"m k+, n k+ -> m n": a matmul can be cut along m and n, which gives parts of the result, and along
k, which gives partial sums of all of it. A letter with ^ is not cut: every element along it is
needed at once. h/64 is cut between groups of 64 elements only (a head); other operands may count
the groups. A 1 is a dimension of one element that is broadcast. After nnScaler (Lin et al., OSDI
2024). Used by ark.parallel.transform.pieces.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ark.errors import ModelError, UnsupportedError
from ark.ir.attributes import AttentionAttributes
from ark.ir.graph import Node
from ark.parallel.transform.carried import EXPERT
from ark.parallel.transform.views import View
from ark.tasks.functions import FUNCTIONS

LETTERS = string.ascii_lowercase
WORD = re.compile(r"([a-z1])(\+|\^|/[1-9][0-9]{0,8})?")


@dataclass(frozen=True)
class Annotation:
    """operands: for each input, and last the output, one letter per dimension ("1": broadcast).

    summed: letters along which parts are partial sums. frozen: letters that are not cut. groups:
    elements that stay together, for each letter of the operands.
    """

    operands: tuple[tuple[str, ...], ...]
    summed: frozenset[str]
    frozen: frozenset[str]
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Annotation:
        """Reads "m k+, n k+ -> m n"; raises ModelError for anything else."""
        left, arrow, right = text.partition("->")
        parts = [part.split() for part in (*left.split(","), right)]
        matches = [[WORD.fullmatch(w) for w in part] for part in parts]
        if not arrow or not all(m for part in matches for m in part):
            raise ModelError(
                f"{text!r} is not an annotation; write letters as in 'm k+, n k+ -> m n'"
            )
        words = [[(m[1], m[2] or "") for m in part if m] for part in matches]
        marked = {word for part in words for word in part}
        return cls(
            tuple(tuple(letter for letter, _ in part) for part in words),
            frozenset(letter for letter, mark in marked if mark == "+"),
            frozenset(letter for letter, mark in marked if mark == "^"),
            tuple(tuple(int(m[1:]) if m[:1] == "/" else 1 for _, m in part) for part in words),
        )

    def sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """For each letter the number of elements, or of groups, into which operands of these shapes
        can be cut.
        """
        size_of: dict[str, int] = {}
        for letters, groups, shape in zip(self.operands, self.groups, shapes, strict=True):
            for letter, group, size in zip(letters, groups, shape, strict=True):
                units = size // group if size % group == 0 else 1
                size_of[letter] = math.gcd(size_of.get(letter, units), units)
        return size_of

    def __str__(self) -> str:
        def word(letter: str, group: int) -> str:
            mark = "+" * (letter in self.summed) + "^" * (letter in self.frozen)
            return letter + (mark or (f"/{group}" if group > 1 else ""))

        parts = [
            " ".join(word(*pair) for pair in zip(part, groups, strict=True))
            for part, groups in zip(self.operands, self.groups, strict=True)
        ]
        return f"{', '.join(parts[:-1])} -> {parts[-1]}"


def annotate(node: Node) -> Annotation:
    """The annotation of a node; raises UnsupportedError for ops that have none."""
    rule = RULES.get(node.type, _pointwise if node.type in FUNCTIONS else None)
    whole = "shape" in node.attrs and "expr" not in node.attrs
    indexed = _reads_index(node.attrs.get("expr", []))
    if rule is None or whole or indexed or len(node.outputs) != 1:
        raise UnsupportedError(
            f"{node.name} is a {node.type}, which cannot be split; assign the whole op to ranks"
        )
    annotation = Annotation.parse(rule(node))
    assert all(
        len(letters) == len(t.shape)
        for letters, t in zip(annotation.operands, (*node.inputs, *node.outputs), strict=True)
    )
    return annotation


def _reads_index(tree: Sequence[Any]) -> bool:
    """True if an expression (ark.tasks.expression) depends on the index of its element."""
    return bool(tree) and (
        tree[0] == "index" or any(_reads_index(t) for t in tree[1:] if isinstance(t, (list, tuple)))
    )


def _pointwise(node: Node) -> str:
    """Dimensions match from the last one, as in NumPy's broadcasting."""
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
    """Ops that need whole rows: norms and softmax."""
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


def _heads(node: Node) -> str:
    """Rows of heads, rotated by position: rows stay whole, because positions count from the
    first.
    """
    return f"x^ h/{node.attrs['head_dim']}, 1, d^ -> x^ h/{node.attrs['head_dim']}"


def _attention(node: Node) -> str:
    head = f"h/{node.attrs['head_dim']}"
    return f"x^ {head}, h c^ d^, h c^ d^, 1 -> x^ {head}"


def _expert_linear(node: Node) -> str:
    """By experts: each part has zeros for the rows of other experts."""
    rows = "r s k+" if len(node.inputs[0].shape) == 3 else "r k+"
    return f"{rows}, {EXPERT}+ n k+, r s -> r s n"


def _append(node: Node) -> str:
    return f"x^ h/{node.outputs[0].shape[-1]}, 1, h c^ d^ -> h c^ d^"


def _embed(node: Node) -> str:
    """Looks up rows by tokens, from a position on."""
    return "t^, v^ y, 1 -> x^ y"


def local_attrs(node: Node, inputs: Sequence[View], output: Sequence[int]) -> Mapping[str, Any]:
    """A node's attributes for a piece of it that reads these views and writes this shape."""
    if node.type == "expert_linear":
        experts = node.inputs[1].shape[0]
        first, last = inputs[1].box[0]
        own = {"first": first, "of": experts} if last - first < experts else {}
        return {**node.attrs, **own}
    if node.type == "attention":
        return {**node.attrs, "heads": output[-1] // node.read(AttentionAttributes).head_dim}
    return {**node.attrs, "shape": tuple(output)} if "expr" in node.attrs else node.attrs


def _reshape(node: Node) -> str:
    """Dimensions in runs of equal products; a run may be cut along the first dimension of either
    side.
    """
    sides = [list(node.inputs[0].shape), list(node.outputs[0].shape)]
    words: list[list[str]] = [[], []]
    names = iter(LETTERS)
    while any(sides):
        runs = [[side.pop(0)] if side else [1] for side in sides]
        while math.prod(runs[0]) != math.prod(runs[1]):
            short = int(math.prod(runs[1]) < math.prod(runs[0]))
            runs[short].append(sides[short].pop(0))
        shared, begun = next(names), [False, False]
        for k, run in enumerate(runs):
            for size in run:
                first = size > 1 and not begun[k]
                begun[k] |= first
                words[k].append(shared if first else "1" if size == 1 else next(names) + "^")
    shapes = (node.inputs[0].shape, node.outputs[0].shape)
    joined = [" ".join(w[: len(shape)]) for w, shape in zip(words, shapes, strict=True)]
    return " -> ".join(joined)


def _embedding(node: Node) -> str:
    names = " ".join(LETTERS[: len(node.inputs[0].shape)])
    return f"{names}, y^ x -> {names} x"


RULES: dict[str, Callable[[Node], str]] = {
    "matmul": _matmul,
    "cast": _pointwise,
    "copy": _pointwise,
    "softmax": _rows,
    "safe_softmax": _rows,
    "log_softmax": _rows,
    "layernorm": _rows,
    "rmsnorm": _rows,
    "reduce_sum": _reduce,
    "reduce_mean": _reduce,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
    "transpose": _transpose,
    "embedding": _embedding,
    "embed": _embed,
    "expand": _pointwise,
    "pointwise": _pointwise,
    "reshape": _reshape,
    "rotary_embedding": _heads,
    "attention": _attention,
    "expert_linear": _expert_linear,
    "kv_append": _append,
}
