"""Messages to the person at the terminal, on standard error, by Python's logger `ark`.

ARK_LOG_LEVEL (DEBUG, INFO, WARN, ERROR), `ark --log-level` and `set_level` say from which level on;
default WARN. At DEBUG ark says which device was opened, what was planned, compiled, taken from the
cache and launched, with times. ARK_DEBUG names stages of the compiler, with commas between them:
each prints what it decided and why. A program adds handlers to `logging.getLogger("ark")` as usual.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from threading import Timer
from time import monotonic

NAMES = ("DEBUG", "INFO", "WARN", "ERROR")
PATIENCE_S = 5.0  # after which a long step says that it goes on
# The levels of Python's logging that ARK's numbers 0 to 3 stand for.
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)


class _StandardError(logging.Handler):
    """Writes to the standard error of the moment, which tests and launchers exchange."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints `ark LEVEL: message`."""
        name = NAMES[_LEVELS.index(record.levelno)] if record.levelno in _LEVELS else ""
        print(f"ark {(name or record.levelname).lower()}: {record.getMessage()}", file=sys.stderr)


_LOGGER = logging.getLogger("ark")
_LOGGER.propagate = False
_LOGGER.addHandler(_StandardError())


class Level(int):
    """A level; calling it writes a message of that level, as ARK's scripts do."""

    def __call__(self, *words: object) -> None:
        """Writes the words, with spaces between, as a message of this level."""
        log(self, " ".join(str(word) for word in words))


DEBUG, INFO, WARN, ERROR = (Level(number) for number in range(4))


def _wanted() -> int:
    word = os.environ.get("ARK_LOG_LEVEL", "WARN").upper()
    return NAMES.index(word) if word in NAMES else WARN


def get_level() -> int:
    """The lowest level that is shown, 0 (DEBUG) to 3 (ERROR)."""
    return sum(_LOGGER.level > level for level in _LEVELS[:3])


def set_level(level: int) -> None:
    """Sets the lowest level that is shown, 0 (DEBUG) to 3 (ERROR)."""
    _LOGGER.setLevel(_LEVELS[level])


set_level(_wanted())


def log(level: int, message: str) -> None:
    """One line, if its level is shown."""
    _LOGGER.log(_LEVELS[level], "%s", message)


def debug(message: str) -> None:
    """One line, for looking for a cause."""
    log(DEBUG, message)


def info(message: str) -> None:
    """One line on how ark goes on."""
    log(INFO, message)


def warn(message: str) -> None:
    """One line on a thing that may not be wanted."""
    log(WARN, message)


@contextmanager
def timed(step: str) -> Iterator[None]:
    """At DEBUG, how long the block took: `step: N ms`."""
    begin = monotonic()
    yield
    debug(f"{step}: {1e3 * (monotonic() - begin):.1f} ms")


@contextmanager
def slow(step: str) -> Iterator[None]:
    """Where the block takes longer than a few seconds, says that it goes on."""
    timer = Timer(PATIENCE_S, warn, (f"{step}; this goes on",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


STAGES = ("passes", "lower", "plan", "codegen")


def shows(stage: str) -> bool:
    """True where ARK_DEBUG names this stage."""
    return stage in _stages(os.environ.get("ARK_DEBUG", ""))


def show(stage: str, message: str) -> None:
    """The lines of a stage's message. Callers make one only where the stage `shows`."""
    for line in message.splitlines():
        print(f"ark {stage}: {line}", file=sys.stderr)


_NOTED: dict[tuple[str, str, str], int] = {}  # how often: by stage, subject and message
_SUBJECT: ContextVar[str] = ContextVar("subject", default="")  # of decisions noted next


def about(subject: str) -> None:
    """Says which part of a model the decisions that follow are about, such as a phase."""
    _SUBJECT.set(subject)


def note(stage: str, message: str) -> None:
    """Keeps a decision that is made many times, for `show_noted`, where the stage `shows`."""
    if shows(stage):
        key = (stage, _SUBJECT.get(), message)
        _NOTED[key] = _NOTED.get(key, 0) + 1


def show_noted(stage: str) -> None:
    """Prints each kept decision of a stage once, with its subject and how often it was made."""
    for key in [key for key in _NOTED if key[0] == stage]:
        count, (_, subject, message) = _NOTED.pop(key), key
        where = f"{subject}: " if subject else ""
        show(stage, f"{where}{count} times: {message}" if count > 1 else f"{where}{message}")
    about("")


@cache
def _stages(names: str) -> frozenset[str]:
    """The stages that ARK_DEBUG names. An unknown name is a warning, once."""
    named = [name.strip().lower() for name in names.split(",") if name.strip()]
    for name in named:
        if name not in STAGES:
            warn(
                f"ARK_DEBUG names {name!r}, which is not a stage; the stages are "
                f"{', '.join(STAGES)}"
            )
    return frozenset(named)
