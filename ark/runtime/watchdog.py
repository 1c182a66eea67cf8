"""Ends a rank when its launcher ends. Run as a script, it requests that of the operating system,
then becomes the rank's program; it is a script so that starting a rank does not import ark.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

# The variable that gives rank 0 a pipe for its last paragraph, which the launcher prints once for
# all ranks with the same one.
LAST_WORDS = "ARK_LAST_WORDS"
_PR_SET_PDEATHSIG = 1


def tie_to(parent: int) -> None:
    """Ends this process when process `parent`, its launcher, ends (Linux; elsewhere nothing)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    tie_to(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        print(f"ark: cannot start {sys.argv[2]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
