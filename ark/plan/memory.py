"""Memory layout: assigns each buffer an offset in its arena (one allocation per kind of memory).
Activations that are never alive at the same time may share memory. Called by ark.lower.contents.

Activations are placed one by one, the largest first, at the lowest offset that is free for their
lifetime (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020,
section 5.2). Ties are broken by id, so the result is deterministic.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

BUFFER_ALIGNMENT_BYTES = 256
# If activations have at most this many bytes in total, each may get memory of its own, so that no
# op has to wait for another because of shared memory.
MAX_UNSHARED_BYTES = 32 << 20
MAX_LITTLE_BYTES = 64 << 10  # of an activation that counts as small


def align(nbytes: int) -> int:
    return (nbytes + BUFFER_ALIGNMENT_BYTES - 1) // BUFFER_ALIGNMENT_BYTES * BUFFER_ALIGNMENT_BYTES


def lay_out(sizes: Sequence[tuple[int, int]]) -> tuple[dict[int, int], int]:
    """Places buffers, given as (id, nbytes), one after the other at aligned offsets. Returns the
    offsets by id and the total size.
    """
    offsets, total = {}, 0
    for key, nbytes in sizes:
        offsets[key] = total
        total += align(nbytes)
    return offsets, total


def share(
    sizes: Mapping[int, int], lifetimes: Mapping[int, tuple[int, int]]
) -> tuple[dict[int, int], int]:
    """Places buffers so that two buffers overlap only if they are never alive at the same time.
    lifetimes: for each id, the first and the last index of a use (both included). Returns the
    offsets by id and the total size.
    """
    placed = _Placed(max((last for _, last in lifetimes.values()), default=0) + 1)
    offsets: dict[int, int] = {}
    total = 0
    for key in sorted(sizes, key=lambda k: (-sizes[k], k)):
        first, last = lifetimes[key]
        size = align(sizes[key])
        at = 0
        for begin, end in sorted(placed.alive(first, last)):
            if at + size <= begin:
                break
            at = max(at, end)
        offsets[key] = at
        placed.add(first, last, (at, at + size))
        total = max(total, at + size)
    return offsets, total


class _Placed:
    """The byte ranges that are occupied so far, searchable by lifetime. They are in a segment tree
    and in a list sorted by first use. With these two, the time of a search is proportional to the
    number of its results.
    """

    def __init__(self, times: int) -> None:
        self._leaves = 1 << (times - 1).bit_length()
        self._tree: dict[int, list[tuple[int, int]]] = {}
        self._births: list[tuple[int, tuple[int, int]]] = []

    def add(self, first: int, last: int, place: tuple[int, int]) -> None:
        bisect.insort(self._births, (first, place))
        low, high = first + self._leaves, last + 1 + self._leaves
        while low < high:
            if low & 1:
                self._tree.setdefault(low, []).append(place)
                low += 1
            if high & 1:
                high -= 1
                self._tree.setdefault(high, []).append(place)
            low, high = low >> 1, high >> 1

    def alive(self, first: int, last: int) -> list[tuple[int, int]]:
        """The occupied byte ranges of buffers whose lifetime overlaps the period from `first` to
        `last`.
        """
        ranges: list[tuple[int, int]] = []
        node = first + self._leaves
        while node:
            ranges += self._tree.get(node, ())
            node >>= 1
        low = bisect.bisect_left(self._births, (first + 1,))
        high = bisect.bisect_left(self._births, (last + 1,))
        return ranges + [place for _, place in self._births[low:high]]
