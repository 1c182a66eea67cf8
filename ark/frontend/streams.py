"""Supports the `stream` argument of ARK's calls. A call with a stream first waits for the work that
is queued on the stream, then accesses memory. Called by ark.frontend.tensor and
ark.runtime.runtime.
"""

from __future__ import annotations

import sys
from typing import Protocol, TypeAlias

from ark.errors import InvalidUsageError


class Stream(Protocol):
    """A stream (queue) of a device, such as a torch stream."""

    def synchronize(self) -> object:
        """Returns when all work that is queued on the stream is done."""


StreamLike: TypeAlias = "Stream | int | None"


def wait_for_stream(stream: StreamLike) -> None:
    """Waits for the work on a stream, an object with a method synchronize(); 0 and None mean no
    stream. Raises InvalidUsageError for anything else. A stream's number is not accepted, because
    it does not identify the vendor.
    """
    if stream is None or (stream == 0 and isinstance(stream, int)):
        return
    synchronize = getattr(stream, "synchronize", None)
    if not callable(synchronize):
        raise InvalidUsageError(
            f"stream={stream!r:.60} is not valid; give an object with synchronize(), such as a "
            "torch stream, or 0 for none"
        )
    synchronize()


def synchronize() -> None:
    """Waits for the work on torch's current stream, if torch uses an accelerator.

    It does not wait for the whole device, because a persistent kernel would never let that wait
    end.
    """
    torch = sys.modules.get("torch")
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        accelerator.current_stream().synchronize()
