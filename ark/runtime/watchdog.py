"""Ends a rank when its launcher ends. Run as a script, it asks the operating system to do so, and
then becomes the rank's program. It is a script so that starting a rank does not import ark.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

# The environment variable that gives rank 0 a pipe for its last error paragraph. The launcher
# prints equal paragraphs of several ranks once.
LAST_WORDS = "ARK_LAST_WORDS"
_PR_SET_PDEATHSIG = 1


def tie_to(parent: int) -> None:
    """Ends this process when its launcher, the process `parent`, ends. Has an effect on Linux
    only.
    """
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
