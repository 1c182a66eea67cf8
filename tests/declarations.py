"""Parts of device code, for tests that compile a few functions of a header on the host."""

from __future__ import annotations


def _begin(text: str, declaration: str, start: int = 0) -> int:
    """The place where the declaration that has these words begins, with its comment: after an
    empty line, a line that ends a declaration, or a directive. Raises ValueError if the text has no
    such words after `start`.
    """
    place = text.index(declaration, start)
    lines = text[:place].split("\n")[:-1]
    while lines and lines[-1] not in ("", "}", "};") and not lines[-1].startswith("#"):
        lines.pop()
    return sum(len(line) + 1 for line in lines)


def cut(text: str, first: str, after: str) -> str:
    """The declarations from the one that has the words `first` up to, and without, the next one
    that has the words `after`.
    """
    begin = _begin(text, first)
    return text[begin : _begin(text, after, text.index(first))]
