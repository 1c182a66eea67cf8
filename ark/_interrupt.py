"""Ctrl-C while the `ark` command still loads: the first that runs of ark.

Until `ark.cli.main` can catch the exception, an interrupt would be a traceback out of whatever is
being imported. Imported for that by ark/__init__.py; nothing is done where ark is a library.
"""

import os
import signal
import sys

INTERRUPTED_EXIT_CODE = 130  # of a command that Ctrl-C has ended


def _is_command() -> bool:
    """True for `python -m ark`, which loads the package before __main__, and the `ark` script."""
    first, words = sys.argv[:1], sys.orig_argv
    if first == ["-m"]:
        return "-m" in words and words[words.index("-m") + 1] == "ark"
    return bool(first) and os.path.basename(first[0]) == "ark"


def _leave(number: int, frame: object) -> None:
    os._exit(INTERRUPTED_EXIT_CODE)  # nothing is begun yet that would have to be undone


def becomes_exception() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt, as in other programs."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Where a shell has had interrupts ignored, they stay ignored.
if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
