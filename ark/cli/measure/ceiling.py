"""Measures the maximum read and copy bandwidth of a device with torch. Measured times are compared
with them: a decoder reads all of its weights for every token (ark.cli.measure.decode), and a
memory-bound op takes at least about as long as a copy of the same number of bytes
(ark.cli.measure.ops).
"""

from __future__ import annotations

import contextlib
import functools

from ark.cli.measure.peer import import_torch, repeated, torch_device

ACCELERATOR_READ_BYTES, HOST_READ_BYTES = 1 << 31, 1 << 28  # bytes to read, more than caches hold
# The number of bytes of the timed copy. In a captured graph, larger copies run on copy engines,
# which are slower on an H100.
COPY_BYTES = 1 << 29
COPIES_S = 0.02  # about how long one measurement of repeated copies takes


@functools.cache
def copy_seconds(nbytes: int, accelerated: bool) -> float:
    """Seconds of a copy that reads and writes `nbytes` bytes in total: the median of five
    measurements.
    """
    torch = import_torch()
    count = max(1, nbytes // 8)
    device = torch_device(accelerated)
    source, target = (torch.ones(count, dtype=torch.float32, device=device) for _ in range(2))
    with contextlib.ExitStack() as stack:
        timed = repeated(lambda: target.copy_(source), accelerated, stack)
        once = max(timed(2), 1e-7)
        return sorted(timed(max(2, int(COPIES_S / once))) for _ in range(5))[2]


def copy_bandwidth(accelerated: bool) -> float:
    """Bytes per second, read and written, of a copy that is larger than any cache."""
    nbytes = COPY_BYTES if accelerated else HOST_READ_BYTES
    return nbytes / copy_seconds(nbytes, accelerated)


def read_bandwidth(accelerated: bool) -> float:
    """Bytes per second of the fastest of several reductions over random numbers, each repeated many
    times.
    """
    torch = import_torch()
    count = (ACCELERATOR_READ_BYTES if accelerated else HOST_READ_BYTES) // 4
    x = torch.empty(count, device=torch_device(accelerated)).uniform_()
    rows = x.view(-1, 1 << 14)
    calls = (x.sum, x.max, lambda: rows.sum(1), lambda: torch.dot(x, x))
    best = 0.0
    for call in calls:
        with contextlib.ExitStack() as stack:
            timed = repeated(call, accelerated, stack)
            best = max(best, *(4 * count / timed(3) for _ in range(3)))
    return best
