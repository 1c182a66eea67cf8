"""Keeps the memory accesses of a program with which later ops can still conflict. Accesses that a
later write has covered are dropped. Used by the scheduler, which adds waits, and by the verifier,
which checks them.

The bytes of an address space are divided into intervals, each with the accesses that touch it. A
write that covers every byte of an interval removes all accesses of the interval; a write that
covers every element of an earlier access removes this access. Removing is safe: a later op that
conflicts with the removed access also conflicts with the write, so it runs after the write, which
runs after the removed access. So a search returns few accesses, whatever the length of the program.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from ark.plan.access import Region


@dataclass
class _Space:
    """An address space divided into intervals. Interval i begins at byte starts[i] and ends where
    interval i + 1 begins.
    """

    starts: list[int] = field(default_factory=lambda: [0])
    writers: list[list[Region]] = field(default_factory=lambda: [[]])
    readers: list[list[Region]] = field(default_factory=lambda: [[]])

    def cut(self, at: int) -> int:
        """The number of the interval that begins at byte `at`. If the byte is inside an interval,
        that interval is divided there first.
        """
        i = bisect_right(self.starts, at) - 1
        if self.starts[i] == at:
            return i
        self.starts.insert(i + 1, at)
        self.writers.insert(i + 1, list(self.writers[i]))
        self.readers.insert(i + 1, list(self.readers[i]))
        return i + 1

    def cover(self, region: Region) -> None:
        """Removes the accesses that a write covers. If it writes every byte of its range, the
        intervals of the range become one.
        """
        first, last = self.cut(region.begin), self.cut(region.end)
        if region.boxes.fills_span:
            self.starts[first:last] = [region.begin]
            self.writers[first:last] = [[]]
            self.readers[first:last] = [[]]
            return
        for held in (*self.writers[first:last], *self.readers[first:last]):
            held[:] = [e for e in held if not region.covers(e)]


class Frontier:
    """The memory accesses of one phase of one rank with which later ops can still conflict. Ops are
    added in program order.
    """

    def __init__(self) -> None:
        self._spaces: dict[Hashable, _Space] = {}

    def conflicts(self, region: Region) -> list[Region]:
        """Earlier accesses that may conflict with a region on bytes that both touch, in a fixed
        order.
        """
        space = self._spaces.get(region.space)
        if space is None:
            return []
        begin, end = region.begin, region.end
        i = bisect_right(space.starts, begin) - 1
        regions: dict[int, Region] = {}
        while i < len(space.starts) and space.starts[i] < end:
            for entry in space.writers[i]:
                regions[id(entry)] = entry
            if region.write:
                for entry in space.readers[i]:
                    regions[id(entry)] = entry
            i += 1
        return [e for e in regions.values() if e.begin < end and begin < e.end and region.meets(e)]

    def add(self, mine: Sequence[Region]) -> None:
        """Adds an op's accesses. All conflicts of the op must be requested (by `conflicts`) before
        this call.
        """
        for region in mine:
            boxes = region.boxes
            if boxes.write and not boxes.append_only and (boxes.fills_span or boxes.fills_bounds):
                self._space(region).cover(region)
        for region in mine:
            space = self._space(region)
            first, last = space.cut(region.begin), space.cut(region.end)
            held = space.writers if region.write else space.readers
            for i in range(first, last):
                held[i].append(region)

    def _space(self, region: Region) -> _Space:
        return self._spaces.setdefault(region.space, _Space())
