"""Checks of a custom op's source before it is compiled, for mistakes whose compiler message would
not refer to the user's text, and the macros that end with that text.

A custom op is code that its author trusts: it runs in the process that declares it, like the
Python around it, and nothing here keeps a text from anything. Called by ark.tasks.custom_form.
"""

from __future__ import annotations

import re

from ark.errors import InvalidUsageError

_PLAIN = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.S)  # comments, strings
_WORD = re.compile(r"[A-Za-z_]\w*")
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*(include|import)\b", re.M)
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.M)


def _stripped(text: str) -> str:
    """The text with spaces for comments and strings, its lines where they were."""
    return _PLAIN.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text.replace("\\\n", " \n"))


def macros(text: str) -> tuple[str, ...]:
    """The macros that the text defines; they end behind the text."""
    return tuple(dict.fromkeys(_MACRO.findall(_stripped(text))))


def check_text(name: str, file: str, text: str) -> None:
    """InvalidUsageError for a text that is not Unicode, includes a file or lacks its function."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        raise InvalidUsageError(
            f"custom op {name!r}: {file}:{line} has a lone surrogate "
            f"(U+{ord(text[error.start]):04X}), which UTF-8 cannot hold; read the text with the "
            "encoding in which it was written"
        ) from None
    plain = _stripped(text)
    for match in _INCLUDE.finditer(plain):
        line = plain.count("\n", 0, match.start()) + 1
        raise InvalidUsageError(
            f"custom op {name!r}: {file}:{line} has #{match[1]}; the text lies within a namespace "
            "and every vendor's compiler gets it without other files: copy what it needs into the "
            "text"
        )
    if name not in _WORD.findall(plain):
        raise InvalidUsageError(
            f"custom op {name!r}: {file} has no function of that name; expected a template "
            f"`ARK_DEVICE void {name}(ArkCtx& c, const Task& task, ...)` with every operand"
        )
