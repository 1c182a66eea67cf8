"""The order in which a plan's tasks must run because of their memory accesses, as arrays, so that
many requirements are checked at once. Collected and checked by ark.plan.verify.conflicts.

A requirement is called a need here: a set of earlier tasks that must precede a later task. A later
task may have several needs. A processor runs its tasks in order, so of the tasks of a need on one
processor only the last is kept. Tasks are given by their numbers, called nodes.
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
    """All required orders as arrays. A need is a set of earlier tasks (nodes). For each i, task
    later[i] must come after all tasks of need number need[i]. The tasks of need n are
    earlier[starts[n] : starts[n + 1]]. which[n]: the required relation (RAN, SEEN or AWAITED, see
    `must`).
    """

    later: np.ndarray
    need: np.ndarray
    starts: np.ndarray
    earlier: np.ndarray
    which: np.ndarray


class Needs:
    """The needs collected so far. A need is a set of earlier tasks that must precede a later task.
    Tasks are given by node numbers, which count the tasks of one rank or of all ranks.
    """

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
        """Adds the orders that two accesses require. Where the regions `first` and `second`
        overlap, the tasks of `second` must come after those of `first`. firsts, seconds: the tasks
        of their ops, as node numbers.
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
        """The two memory accesses (first, second) from which a required order was derived. need:
        the number of the requirement.
        """
        return self._pairs[bisect_right(self._firsts, need) - 1]

    def freeze(self, processors: np.ndarray) -> Frozen:
        """The collected requirements as arrays. processors: the processor of each task. A processor
        runs its tasks in order, so of the earlier tasks on each processor only the last is kept.
        """
        if not self._count:
            none = np.zeros(0, np.int64)
            return Frozen(none, none, np.zeros(1, np.int64), none, none)
        entry, earlier = np.concatenate(self._entries), np.concatenate(self._earlier)
        # Nodes (tasks) are numbered processor by processor. So the earlier nodes are sorted, and of
        # those on one processor only the last one is kept.
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
    """The relation in which the first of two conflicting accesses must be ordered before the
    second. SEEN: the first access is to plain memory, so it must be complete, and its writes must
    be visible to the second. AWAITED: the second reads packets that the first writes, so the reader
    waits for the packets. RAN: the first access is to packets but the second does not read them as
    packets, so the first access's task must only have run.
    """
    if not first.packet:
        return SEEN
    return AWAITED if come_as_packets(first, second) else RAN


def come_as_packets(written: Region, read: Region) -> bool:
    """True where the second access reads packets that the first writes. The abstract execution
    (ark.plan.verify.packets) then lets the reading task wait for the writing task.
    """
    here = written.packet and read.packet and written.memory == read.memory
    return here and written.write and not read.write and not (written.pretended or read.pretended)


def unmet(frozen: Frozen, order: Order, base: int) -> tuple[int, int, int] | None:
    """Returns None if the plan's order guarantees all required orders. Otherwise returns one that
    it does not guarantee, as (earlier task, later task, number of the requirement). base: the
    number that is added to the task numbers in `frozen` to get numbers over all ranks.
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
    # Tasks with equal vector clocks are checked as one group. If the clock implies an order, the
    # order holds for all tasks of the group.
    open_ = np.zeros(len(distinct), bool)
    for chunk in _chunks(last - first):
        at = spans(first[chunk], last[chunk])
        row = np.repeat(np.arange(chunk.start, chunk.stop), (last - first)[chunk])
        earlier = frozen.earlier[at] + base
        open_[row[~order.known(rows[row], earlier, rank[row])]] = True
    if not open_.any():
        return None
    # An order that the vector clock does not imply may still follow from the tasks' positions on
    # the same processor.
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
    """Divides rows into slices (consecutive rows) with about CHUNK_ENTRIES entries in total, to
    bound memory. sizes: the number of entries of each row.
    """
    ends = np.cumsum(sizes)
    cuts = [0]
    while cuts[-1] < len(sizes):
        base = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(ends, base + CHUNK_ENTRIES, "right"))))
    return [slice(a, b) for a, b in itertools.pairwise(cuts)]
