"""Memory: every buffer gets an offset in its arena; activations share by lifetimes.

Greedy by size over lifetimes in op order (as in Pisarchyk and Lee, "Efficient Memory Management for
Deep Neural Net Inference", 2020, section 5.2); ties by id, so the result is deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ALIGN = 256


def align(nbytes: int) -> int:
    return (nbytes + ALIGN - 1) // ALIGN * ALIGN


def lay_out(sizes: Sequence[tuple[int, int]]) -> tuple[dict[int, int], int]:
    """Consecutive offsets for (id, nbytes); returns offsets by id and the total."""
    offsets, total = {}, 0
    for key, nbytes in sizes:
        offsets[key] = total
        total += align(nbytes)
    return offsets, total


def share(
    sizes: Mapping[int, int], lifetimes: Mapping[int, tuple[int, int]]
) -> tuple[dict[int, int], int]:
    """Offsets such that buffers alive at the same time (ends included) do not overlap."""
    placed: list[tuple[int, int, int, int]] = []  # offset, end, first, last
    offsets: dict[int, int] = {}
    total = 0
    for key in sorted(sizes, key=lambda k: (-sizes[k], k)):
        first, last = lifetimes[key]
        size = align(sizes[key])
        at = 0
        for begin, end, other_first, other_last in sorted(placed):
            if other_last < first or last < other_first:
                continue
            if at + size <= begin:
                break
            at = max(at, end)
        offsets[key] = at
        placed.append((at, at + size, first, last))
        total = max(total, at + size)
    return offsets, total
