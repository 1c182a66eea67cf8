"""Messages to the person at the terminal, on standard error, by level.

ARK_LOG_LEVEL (DEBUG, INFO, WARN, ERROR) says from which level on; default WARN.
"""

from __future__ import annotations

import os
import sys

NAMES = ("DEBUG", "INFO", "WARN", "ERROR")


class Level(int):
    """A level; calling it writes a message of that level, as ARK's scripts do."""

    def __call__(self, *words: object) -> None:
        log(self, " ".join(str(word) for word in words))


DEBUG, INFO, WARN, ERROR = (Level(number) for number in range(4))


def _wanted() -> int:
    word = os.environ.get("ARK_LOG_LEVEL", "WARN").upper()
    return NAMES.index(word) if word in NAMES else WARN


_level = [_wanted()]


def get_level() -> int:
    """The lowest level that is shown."""
    return _level[0]


def set_level(level: int) -> None:
    """Sets the lowest level that is shown."""
    _level[0] = level


def log(level: int, message: str) -> None:
    """One line, if its level is shown."""
    if level >= get_level():
        print(f"ark {NAMES[level].lower()}: {message}", file=sys.stderr)


def debug(message: str) -> None:
    log(DEBUG, message)


def info(message: str) -> None:
    log(INFO, message)


def warn(message: str) -> None:
    log(WARN, message)
