"""The parent-death watchdog: ties a rank's life to its launcher's. Run as a script, it asks the
kernel for that, then becomes the rank's program; as a script, so starting a rank imports no ark.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

# The variable that gives rank 0 a pipe for the paragraph that it ends with, which its launcher says
# once for all ranks that end with the same.
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
