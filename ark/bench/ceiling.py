"""What a device can read at most: the ceiling beside which a decoder's time stands, because it
reads all of its weights for every token. Measured with torch; called by ark.bench.decode.
"""

from __future__ import annotations

import contextlib

from ark.bench.peer import import_torch, repeated, torch_device

ACCELERATED, HOST = 1 << 31, 1 << 28  # bytes that are read: far more than any cache holds


def read_bandwidth(accelerated: bool) -> float:
    """Bytes a second of the fastest of several reductions of random numbers, many times over."""
    torch = import_torch()
    count = (ACCELERATED if accelerated else HOST) // 4
    x = torch.empty(count, device=torch_device(accelerated)).uniform_()
    rows = x.view(-1, 1 << 14)
    calls = (x.sum, x.max, lambda: rows.sum(1), lambda: torch.dot(x, x))
    best = 0.0
    for call in calls:
        with contextlib.ExitStack() as stack:
            timed = repeated(call, accelerated, stack)
            best = max(best, *(4 * count / timed(3) for _ in range(3)))
    return best
