"""The `stream` of ARK's calls: what of the caller's is waited for before memory is touched.

Called by ark.frontend.tensor and ark.api.runtime.
"""

from __future__ import annotations

from typing import Any

from ark.errors import InvalidUsageError


def wait_for_stream(stream: Any) -> None:
    """Waits for an object with synchronize(); 0 and None are no stream.

    InvalidUsageError for anything else: a number alone says of no vendor whose queue it is.
    """
    if stream is None or (stream == 0 and isinstance(stream, int)):
        return
    if not callable(getattr(stream, "synchronize", None)):
        raise InvalidUsageError(
            f"the stream is {stream!r:.60}; give an object with synchronize(), as torch's streams "
            "are, or 0 for none"
        )
    stream.synchronize()
