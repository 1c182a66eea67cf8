"""The `stream` argument of ARK's calls: the work that is waited for before memory is accessed.

Called by ark.frontend.tensor and ark.runtime.runtime.
"""

from __future__ import annotations

import sys
from typing import Any

from ark.errors import InvalidUsageError


def wait_for_stream(stream: Any) -> None:
    """Waits for an object with synchronize(); 0 and None mean no stream.

    Raises InvalidUsageError for anything else: a number alone does not identify a vendor's queue.
    """
    if stream is None or (stream == 0 and isinstance(stream, int)):
        return
    if not callable(getattr(stream, "synchronize", None)):
        raise InvalidUsageError(
            f"stream={stream!r:.60} is not valid; give an object with synchronize(), such as a "
            "torch stream, or 0 for none"
        )
    stream.synchronize()


def synchronize() -> None:
    """Waits for the work on torch's current stream, if torch uses an accelerator.

    Not for the whole device: a persistent kernel would never let that end.
    """
    torch = sys.modules.get("torch")
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        accelerator.current_stream().synchronize()
