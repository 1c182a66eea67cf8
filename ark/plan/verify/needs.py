"""The required orders between tasks, as arrays, so that many are checked at once.

A need is a set of earlier nodes; later nodes each have some needs. Of a set only the last node of
each processor counts, so a need is no longer than a rank has processors. Collected and checked by
ark.plan.verify.conflicts.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from ark.plan.access import Region
from ark.plan.verify.execution import AWAITED, RAN, SEEN, spans
from ark.plan.verify.order import Order

CHUNK_ENTRIES = 1 << 22


@dataclass(frozen=True, eq=False)
class Frozen:
    """later, need: row i says that node later[i] has need need[i]. Entries of need n lie from
    starts[n] to starts[n + 1] in `earlier`; which[n]: they must have run, or be seen.
    """

    later: np.ndarray
    need: np.ndarray
    starts: np.ndarray
    earlier: np.ndarray
    which: np.ndarray


class Needs:
    """Obligations as they are found, in nodes of one rank or of all."""

    def __init__(self) -> None:
        self._count = 0
        self._later: list[np.ndarray] = []
        self._need: list[np.ndarray] = []
        self._entries: list[np.ndarray] = []
        self._earlier: list[np.ndarray] = []
        self._which: list[int] = []
        self._sizes: list[int] = []
        self._pairs: list[tuple[Region, Region]] = []
        self._firsts: list[int] = []

    def add(self, first: Region, second: Region, firsts: np.ndarray, seconds: np.ndarray) -> None:
        """Where the regions overlap, the second's tasks come after the first's. firsts, seconds:
        their ops' nodes.
        """
        if come_as_packets(first, second):
            return
        groups = second.tasks_after(first)
        if not groups.mine:
            return
        (earlier, of_earlier), (later, of_later) = groups.joined
        self._entries.append(of_earlier + self._count)
        self._earlier.append(firsts[earlier])
        self._later.append(seconds[later])
        self._need.append(of_later + self._count)
        self._pairs.append((first, second))
        self._firsts.append(self._count)
        self._which.append(must(first, second))
        self._sizes.append(len(groups.mine))
        self._count += len(groups.mine)

    def pair(self, need: int) -> tuple[Region, Region]:
        """The (first, second) regions that a need comes from."""
        return self._pairs[bisect_right(self._firsts, need) - 1]

    def freeze(self, processors: np.ndarray) -> Frozen:
        """The arrays; processors of the nodes say which entries imply others."""
        if not self._count:
            none = np.zeros(0, np.int64)
            return Frozen(none, none, np.zeros(1, np.int64), none, none)
        entry, earlier = np.concatenate(self._entries), np.concatenate(self._earlier)
        # Nodes are counted processor by processor: the last of each processor stands for those
        # before it.
        codes = entry * len(processors) + earlier
        codes.sort()
        entry, earlier = np.divmod(codes, len(processors))
        processor = processors[earlier]
        last = np.ones(len(codes), bool)
        last[:-1] = (entry[:-1] != entry[1:]) | (processor[:-1] != processor[1:])
        entry, earlier = entry[last], earlier[last]
        return Frozen(
            np.concatenate(self._later),
            np.concatenate(self._need),
            np.searchsorted(entry, np.arange(self._count + 1)),
            earlier,
            np.repeat(np.array(self._which, np.int64), self._sizes),
        )


def must(first: Region, second: Region) -> int:
    """What touches plain memory must be seen, written or read: a packet orders no other memory. A
    packet carries its own epoch: its reader waits for its writer, and the next
    writer needs to know only that it was read.
    """
    if not first.packet:
        return SEEN
    return AWAITED if come_as_packets(first, second) else RAN


def come_as_packets(written: Region, read: Region) -> bool:
    """True where the execution lets readers wait for writers (ark.plan.verify.packets)."""
    here = written.packet and read.packet and written.memory == read.memory
    return here and written.write and not read.write and not (written.pretended or read.pretended)


def unmet(frozen: Frozen, order: Order, base: int) -> tuple[int, int, int] | None:
    """(earlier node, later node, need) of an obligation that the order does not imply; base: what
    to add to the nodes.
    """
    if not len(frozen.later):
        return None
    many, world = len(frozen.which), len(order.home)
    nodes = frozen.later + base
    rows = order.clocks(frozen.which[frozen.need], nodes)
    codes = (rows * world + order.rank[nodes]) * many + frozen.need
    distinct, back = np.unique(codes, return_inverse=True)
    need, rank, rows = distinct % many, distinct // many % world, distinct // many // world
    first, last = frozen.starts[need], frozen.starts[need + 1]
    # Tasks that know the same: what their clock implies holds for all of them.
    open_ = np.zeros(len(distinct), bool)
    for chunk in _chunks(last - first):
        at = spans(first[chunk], last[chunk])
        row = np.repeat(np.arange(chunk.start, chunk.stop), (last - first)[chunk])
        earlier = frozen.earlier[at] + base
        open_[row[~order.known(rows[row], earlier, rank[row])]] = True
    if not open_.any():
        return None
    # The rest may know more: the nodes before them on their own processor.
    later = np.flatnonzero(open_[back.reshape(-1)])
    need = frozen.need[later]
    first, last = frozen.starts[need], frozen.starts[need + 1]
    for chunk in _chunks(last - first):
        at = spans(first[chunk], last[chunk])
        row = np.repeat(np.arange(chunk.start, chunk.stop), (last - first)[chunk])
        earlier, node = frozen.earlier[at] + base, frozen.later[later[row]] + base
        fine = order.before(earlier, node, frozen.which[need[row]])
        if not fine.all():
            bad = int(np.flatnonzero(~fine)[0])
            return int(earlier[bad]), int(node[bad]), int(need[row[bad]])
    return None


def _chunks(sizes: np.ndarray) -> list[slice]:
    """Cuts rows of such sizes into pieces of about CHUNK_ENTRIES entries."""
    ends = np.cumsum(sizes)
    cuts = [0]
    while cuts[-1] < len(sizes):
        base = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(ends, base + CHUNK_ENTRIES, "right"))))
    return [slice(a, b) for a, b in itertools.pairwise(cuts)]
