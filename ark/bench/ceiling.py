"""What a device can read and copy at most, measured with torch: the ceilings beside which times
stand. A decoder reads all of its weights for every token (ark.bench.decode); an op that memory
bounds takes at least about as long as a copy of as many bytes (ark.bench.ops).
"""

from __future__ import annotations

import contextlib
import functools

from ark.bench.peer import import_torch, repeated, torch_device

ACCELERATED, HOST = 1 << 31, 1 << 28  # bytes that are read: far more than any cache holds
# Of a copy: larger ones a graph leaves to copy engines, which are slower (2434 GB/s on an H100,
# where 512 MB go at 3003).
COPIED = 1 << 29
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
    nbytes = COPIED if accelerated else HOST
    return nbytes / copy_seconds(nbytes, accelerated)


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
