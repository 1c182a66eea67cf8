"""Annotations: texts that describe how an op may be split. They name the op's dimensions by
letters, like einops.

"m k+, n k+ -> m n" is a matmul. A cut along m or n gives parts of the result. A cut along k gives
partial sums of the whole result, which the + marks. A letter with ^ is not cut, because every
element along it is needed at once. h/64 is cut only between groups of 64 elements (such as a head).
If another operand has h without /64, its dimension counts these groups. A 1 is a dimension of one
element that is broadcast. The notation is that of nnScaler (Lin et al., OSDI 2024). Used by
ark.parallel.transform.pieces.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ark.errors import ModelError, UnsupportedError
from ark.ir.graph import Node
from ark.lower.registry import get
from ark.parallel.transform.op_rules import RULES, WHOLE, elementwise_rule
from ark.tasks.functions import FUNCTIONS

WORD = re.compile(r"([a-z1])(\+|\^)?(?:/([1-9][0-9]{0,8}))?")


@dataclass(frozen=True)
class Annotation:
    """An annotation as parsed. `operands` has the letters of each dimension of each input and,
    last, of the outputs. "1" is a broadcast dimension.

    summed: letters whose parts are partial sums. frozen: letters that are not cut. groups: for each
    letter of the operands, the number of elements that stay together.
    """

    operands: tuple[tuple[str, ...], ...]
    summed: frozenset[str]
    frozen: frozenset[str]
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Annotation:
        """Reads text such as "m k+, n k+ -> m n". Raises ModelError for any other text."""
        left, arrow, right = text.partition("->")
        sides = [*left.split(","), right] if left.strip() else [right]
        parts = [part.split() for part in sides]
        matches = [[WORD.fullmatch(w) for w in part] for part in parts]
        if not arrow or not all(m for part in matches for m in part):
            raise ModelError(
                f"{text!r} is not an annotation; write letters as in 'm k+, n k+ -> m n'"
            )
        words = [[m for m in part if m] for part in matches]
        marked = {(m[1], m[2]) for part in words for m in part}
        return cls(
            tuple(tuple(m[1] for m in part) for part in words),
            frozenset(letter for letter, mark in marked if mark == "+"),
            frozenset(letter for letter, mark in marked if mark == "^"),
            tuple(tuple(int(m[3] or 1) for m in part) for part in words),
        )

    def sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """For each letter, the number of elements (or groups of elements) along it in operands of
        these shapes. An op can be split into at most this many parts along the letter.
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
            return letter + mark + (f"/{group}" if group > 1 else "")

        parts = [
            " ".join(word(*pair) for pair in zip(part, groups, strict=True))
            for part, groups in zip(self.operands, self.groups, strict=True)
        ]
        return f"{', '.join(parts[:-1])} -> {parts[-1]}"


def annotate(node: Node) -> Annotation:
    """The annotation of a node. Raises UnsupportedError, with the reason, for ops that cannot be
    split.
    """
    elementwise = node.type in FUNCTIONS or node.elementwise.expr is not None
    rule = RULES.get(node.type, elementwise_rule if elementwise else None)
    shapes = {t.shape for t in node.outputs}
    if rule is None or len(shapes) != 1:
        raise UnsupportedError(
            f"{node.name} is a {node.type}, which cannot be split, because {_reason(node)}; "
            "assign the whole op to ranks"
        )
    annotation = Annotation.parse(rule(node))
    assert all(
        len(letters) == len(t.shape)
        for letters, t in zip(annotation.operands, (*node.inputs, node.outputs[0]), strict=True)
    )
    return annotation


def _reason(node: Node) -> str:
    if node.type in WHOLE:
        return WHOLE[node.type]
    op = get(node.type)
    if op.all_ranks or op.names_ranks:
        return "it moves data between ranks"
    return "its results differ in shape" if node.outputs else "it has no result"
