"""Messages to the person at the terminal, on standard error, by level.

ARK_LOG_LEVEL (DEBUG, INFO, WARN, ERROR) says from which level on; default WARN. ARK_DEBUG names
stages of the compiler, with commas between them: each prints what it decided and why.
"""

from __future__ import annotations

import os
import sys
from functools import cache

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


STAGES = ("passes", "lower", "plan", "codegen")


def shows(stage: str) -> bool:
    """True where ARK_DEBUG names this stage."""
    return stage in _stages(os.environ.get("ARK_DEBUG", ""))


def show(stage: str, message: str) -> None:
    """The lines of a stage's message. Callers make one only where the stage `shows`."""
    for line in message.splitlines():
        print(f"ark {stage}: {line}", file=sys.stderr)


@cache
def _stages(names: str) -> frozenset[str]:
    """The stages that ARK_DEBUG names. An unknown name is a warning, once."""
    named = [name.strip().lower() for name in names.split(",") if name.strip()]
    for name in named:
        if name not in STAGES:
            warn(f"ARK_DEBUG names {name!r}, which is no stage; the stages are {', '.join(STAGES)}")
    return frozenset(named)
