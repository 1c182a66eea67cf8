"""Checks a custom op's source before it is compiled, to report mistakes for which the compiler's
message would not point to the user's text. Also lists the macros that the text defines, so that
they can be undefined after it. Called by ark.tasks.custom_form.

A custom op is code that its author trusts: it runs in the process that declares it, with the same
rights as the Python code around it. The checks are not a protection against malicious code.
"""

from __future__ import annotations

import re

from ark.errors import InvalidUsageError

_PLAIN = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.S)  # comments, strings
_WORD = re.compile(r"[A-Za-z_]\w*")
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*(include|import)\b", re.M)
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.M)


def _stripped(text: str) -> str:
    """The text with comments and strings replaced by spaces; line numbers stay the same."""
    return _PLAIN.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text.replace("\\\n", " \n"))


def macros(text: str) -> tuple[str, ...]:
    """The macros that the text defines; they are undefined after the text."""
    return tuple(dict.fromkeys(_MACRO.findall(_stripped(text))))


def check_text(name: str, file: str, text: str) -> None:
    """Raises InvalidUsageError if the text is not Unicode, includes a file or lacks the op's
    function.
    """
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
