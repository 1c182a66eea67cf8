"""Messages for users on standard error, through Python's logger `ark`.

ARK_LOG_LEVEL (DEBUG, INFO, WARN, ERROR), `ark --log-level` and `set_level` set the lowest level
that is shown, by default WARN. At DEBUG ark reports which device was opened, what was planned,
compiled, taken from the cache and launched, with times. ARK_DEBUG lists stages of the compiler,
separated by commas: each prints its decisions with reasons. A program can add handlers to
`logging.getLogger("ark")` as usual.
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
PATIENCE_S = 5.0  # after this time a long step reports that it continues
# Python's logging levels that correspond to ARK's levels 0 to 3.
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)


class _StandardError(logging.Handler):
    """Writes to the present sys.stderr, which tests and launchers may replace."""

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
    """Logs a line at this level."""
    _LOGGER.log(_LEVELS[level], "%s", message)


def debug(message: str) -> None:
    """Logs a line that helps to find a cause of a problem."""
    log(DEBUG, message)


def info(message: str) -> None:
    """Logs a line about progress."""
    log(INFO, message)


def warn(message: str) -> None:
    """Logs a line about something that the user may not want."""
    log(WARN, message)


@contextmanager
def timed(step: str) -> Iterator[None]:
    """A context that logs at DEBUG how long its block took: `step: N ms`."""
    begin = monotonic()
    yield
    debug(f"{step}: {1e3 * (monotonic() - begin):.1f} ms")


@contextmanager
def slow(step: str, aloud: bool = True) -> Iterator[None]:
    """A context that logs that the step continues, if its block takes longer than a few seconds.
    aloud: False to log nothing, for ranks but the first.
    """
    timer = Timer(PATIENCE_S, warn, (f"{step}; this goes on",))
    timer.daemon = True
    if aloud:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


STAGES = ("passes", "lower", "plan", "codegen")


def shows(stage: str) -> bool:
    """True if ARK_DEBUG contains `stage`, so that decisions of this stage are printed."""
    return stage in _stages(os.environ.get("ARK_DEBUG", ""))


def show(stage: str, message: str) -> None:
    """Prints a message of a compiler stage, one line after another. Callers first check with
    `shows` whether the stage is printed, so that the message is not created in vain.
    """
    for line in message.splitlines():
        print(f"ark {stage}: {line}", file=sys.stderr)


_NOTED: dict[tuple[str, str, str], int] = {}  # counts, by stage, subject and message
_SUBJECT: ContextVar[str] = ContextVar("subject", default="")  # subject of later decisions


def about(subject: str) -> None:
    """Sets the subject of the decisions that `note` records from now on: a part of a model, such as
    a phase.
    """
    _SUBJECT.set(subject)


def note(stage: str, message: str) -> None:
    """Records a decision of a compiler stage, for decisions that are made many times. `show_noted`
    prints each different decision once.
    """
    if shows(stage):
        key = (stage, _SUBJECT.get(), message)
        _NOTED[key] = _NOTED.get(key, 0) + 1


def show_noted(stage: str) -> None:
    """Prints each recorded decision of a stage once, with its subject and the number of times."""
    for key in [key for key in _NOTED if key[0] == stage]:
        count, (_, subject, message) = _NOTED.pop(key), key
        where = f"{subject}: " if subject else ""
        show(stage, f"{where}{count} times: {message}" if count > 1 else f"{where}{message}")
    about("")


@cache
def _stages(names: str) -> frozenset[str]:
    """The stages in ARK_DEBUG. There is a warning for an unknown name, once."""
    named = [name.strip().lower() for name in names.split(",") if name.strip()]
    for name in named:
        if name not in STAGES:
            warn(
                f"ARK_DEBUG names {name!r}, which is not a stage; the stages are "
                f"{', '.join(STAGES)}"
            )
    return frozenset(named)
