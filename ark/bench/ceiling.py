"""The maximum read and copy bandwidth of a device, measured with torch, for comparison with
measured times. A decoder reads all of its weights for every token (ark.bench.decode); a
memory-bound op takes at least about as long as a copy of as many bytes (ark.bench.ops).
"""

from __future__ import annotations

import contextlib
import functools

from ark.bench.peer import import_torch, repeated, torch_device

ACCELERATED, HOST = 1 << 31, 1 << 28  # bytes that are read: far more than any cache holds
# Bytes of a copy: a graph runs larger ones on copy engines, which are slower (2434 GB/s on an H100,
# 3003 at 512 MB).
COPY_BYTES = 1 << 29
COPIES_S = 0.02  # about how long copies are timed at once


@functools.cache
def copy_seconds(nbytes: int, accelerated: bool) -> float:
    """Seconds of a copy that reads and writes `nbytes` together: the median of five."""
    torch = import_torch()
    count = max(1, nbytes // 8)
    device = torch_device(accelerated)
    source, target = (torch.ones(count, dtype=torch.float32, device=device) for _ in range(2))
    with contextlib.ExitStack() as stack:
        timed = repeated(lambda: target.copy_(source), accelerated, stack)
        once = max(timed(2), 1e-7)
        return sorted(timed(max(2, int(COPIES_S / once))) for _ in range(5))[2]


def copy_bandwidth(accelerated: bool) -> float:
    """Bytes a second, read and written, of a copy larger than any cache."""
    nbytes = COPY_BYTES if accelerated else HOST
    return nbytes / copy_seconds(nbytes, accelerated)


def read_bandwidth(accelerated: bool) -> float:
    """Bytes per second of the fastest of several reductions of random numbers, repeated many
    times.
    """
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
