"""Handles Ctrl-C while the `ark` command still loads; this is the first module of ark that runs.

Until `ark.cli.main` can catch the exception, an interrupt would print a traceback from the module
that is being imported. ark/__init__.py imports this module first. If ark is used as a library, it
does nothing.
"""

import os
import signal
import sys

INTERRUPTED_EXIT_CODE = 130  # of a command that was ended by Ctrl-C


def _is_command() -> bool:
    """True for `python -m ark`, which loads the package before __main__, and the `ark` script."""
    first, words = sys.argv[:1], sys.orig_argv
    if first == ["-m"]:
        return "-m" in words and words[words.index("-m") + 1] == "ark"
    return bool(first) and os.path.basename(first[0]) == "ark"


def _leave(number: int, frame: object) -> None:
    os._exit(INTERRUPTED_EXIT_CODE)  # nothing has begun that would have to be undone


def becomes_exception() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt from now on, as in other programs."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# If the shell has set interrupts to be ignored, they stay ignored.
if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
