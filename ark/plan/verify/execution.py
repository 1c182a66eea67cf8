"""Executes a phase abstractly, on all ranks at once, to find out which tasks are certainly complete
when each task starts. Used by ark.plan.verify.order, which explains why this is a proof, and by
ark.plan.verify.iterations.

A task can run when its predecessor on its processor has run and its waits are complete. All tasks
that can run do so in one step, with array operations. The result is two vector clocks (Mattern
1989) for each task, rows with one number per processor. The clock RAN has how many tasks of the
processor have certainly run, the clock SEEN how many of them have made their writes visible. Tasks
with equal clocks share a row. The entry of the task's own processor is not stored, because it is
the task's position. So the number of rows grows with the number of distinct sets of waits, not with
the number of tasks.

A read of packets updates only RAN, and only for tasks after the reading task, because each warp of
the reading task may have read different packets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ark.plan.verify.counters import Counters
from ark.plan.verify.rank_set import RankSet

RAN, SEEN, AWAITED = 0, 1, 2  # AWAITED is not a clock: readers of packets wait for writers
MAX_KNOWN_EVENTS = 1 << 12  # events whose rows are cached before the cache is cleared


@dataclass(frozen=True, eq=False)
class Processors:
    """The processors of all ranks, numbered rank by rank. starts: the number of the first processor
    of each rank, and one past the last processor.

    Of ranks that do the same work, only one is executed, the twin of the others. The plan of rank r
    is the plan of its twin with other rank numbers. So each rank q that r communicates with
    corresponds to a rank that the twin communicates with. moved[r, q]: the number that, added to a
    processor of q, gives the processor of this corresponding rank.
    """

    starts: np.ndarray
    moved: np.ndarray

    @classmethod
    def of(cls, rank_set: RankSet, lengths: Sequence[int]) -> Processors:
        starts = np.cumsum([0, *lengths])
        moved = np.zeros((rank_set.world, rank_set.world), np.int64)
        for rank, renaming in enumerate(rank_set.symmetry.renaming):
            for old, new in enumerate(renaming):
                moved[rank, new] = starts[old] - starts[new]
        return cls(starts, moved)

    def seen_by(self, rank: int) -> np.ndarray | None:
        """For each processor p, the processor that is in the plan of the rank's twin (the rank that
        is executed in its place) what p is in the rank's own plan. If clocks of the twin's tasks
        are indexed by the result, they become clocks of the rank's tasks. None if every processor
        corresponds to itself.
        """
        shift = np.repeat(self.moved[rank], np.diff(self.starts))
        return np.arange(len(shift)) + shift if shift.any() else None


@dataclass(frozen=True, eq=False)
class Awaited:
    """Tasks of one rank that wait for packets, and the tasks that write these packets. Each reader
    waits for all writers. readers: the reading tasks, of the checked rank `rank`. makers: the
    writing tasks, as pairs (rank, tasks of that rank).
    """

    rank: int
    readers: np.ndarray
    makers: list[tuple[int, np.ndarray]]


class Run:
    """The abstract execution of a phase. Tasks signal events and wait for them: an event is a
    counter or a set of packets.
    """

    def __init__(
        self,
        processor: np.ndarray,
        position: np.ndarray,
        lengths: np.ndarray,
        processors: Processors,
    ) -> None:
        self.processor, self.position, self.lengths = processor, position, lengths
        self.processors = processors
        small = np.uint16 if lengths.max(initial=0) < 1 << 16 else np.uint32
        self.rows = np.zeros((64, len(lengths)), small)
        self.known = 1
        self.clock = np.zeros((2, len(processor)), np.int64)
        self._numbers: dict[int, int] = {hash(self.rows[0].tobytes()): 0}
        self._events = 0
        self._packet: list[bool] = []
        self._signals: list[np.ndarray] = []  # event, node, rank
        self._waits: list[np.ndarray] = []  # (event, node): waits for all of an event's signals
        # By event: (threshold, node) of each wait for a part of the signals, highest first.
        self._partial: dict[int, list[tuple[int, int]]] = {}
        self._known_after: dict[tuple[int, int], np.ndarray] = {}
        self._columns = [processors.seen_by(rank) for rank in range(len(processors.moved))]

    def add_counters(self, counters: Counters) -> None:
        """Adds an event for each counter that is signalled, and the waits for it. Waits for the
        previous iteration (with threshold 0) are ignored.
        """
        used, event = np.unique(counters.signals[:, 0], return_inverse=True)
        event = event.reshape(-1)
        many = np.bincount(event, minlength=len(used))
        self._signals.append(np.column_stack((event, counters.signals[:, 1:])))
        waits = counters.waits[counters.waits[:, 2] > 0]
        numbers = np.searchsorted(used, waits[:, 0])
        rows = np.column_stack((numbers, waits[:, 1:]))
        full = rows[:, 2] >= many[numbers]
        self._waits.append(rows[full, :2])
        for number, node, threshold in rows[~full].tolist():
            self._partial.setdefault(number, []).append((threshold, node))
        for listed in self._partial.values():
            listed.sort(reverse=True)
        self._events = len(used)
        self._packet = [False] * len(used)

    def add_packets(
        self,
        awaited: Sequence[Awaited],
        executed: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> None:
        """Adds an event for each set of packets that tasks wait for. Of ranks that do the same work
        only one is executed. executed: a function that maps tasks of any rank to the corresponding
        tasks of the executed ranks. Tasks are given as two arrays, ranks and tasks.
        """
        if not awaited:
            return
        numbers = np.arange(self._events, self._events + len(awaited))
        sizes = [len(a.readers) for a in awaited]
        ranks = np.repeat([a.rank for a in awaited], sizes)
        readers = executed(ranks, np.concatenate([a.readers for a in awaited]))
        self._waits.append(np.column_stack((np.repeat(numbers, sizes), readers)))
        many = [sum(len(nodes) for _, nodes in a.makers) for a in awaited]
        parts = [part for a in awaited for part in a.makers]
        ranks = np.repeat([rank for rank, _ in parts], [len(nodes) for _, nodes in parts])
        makers = executed(ranks, np.concatenate([nodes for _, nodes in parts]))
        self._signals.append(np.column_stack((np.repeat(numbers, many), makers, ranks)))
        self._events += len(awaited)
        self._packet += [True] * len(awaited)

    def execute(self) -> tuple[int, int] | None:
        """Executes all tasks. Returns None if all of them ran. Otherwise returns the number of
        tasks that never start, and the first of these tasks.
        """
        nodes = len(self.processor)
        signalled = np.concatenate([*self._signals, np.zeros((0, 3), np.int64)])
        waiting = np.concatenate([*self._waits, np.zeros((0, 2), np.int64)])
        self._index_signals(signalled)
        signals = _Lists(signalled[:, [1, 0]], nodes)
        waiters = _Lists(waiting, self._events)
        counters = waiting[~np.array(self._packet, bool)[waiting[:, 0]]]
        packets = waiting[np.array(self._packet, bool)[waiting[:, 0]]]
        by_counters, by_packets = (
            _Lists(w[:, ::-1], nodes).distinct() for w in (counters, packets)
        )
        ways = (RAN, SEEN) if len(packets) else (RAN,)  # without packets both clocks are equal
        pending = np.bincount(waiting[:, 1], minlength=nodes) + (self.position > 0)
        for listed in self._partial.values():
            np.add.at(pending, [node for _, node in listed], 1)
        totals = np.bincount(signalled[:, 0], minlength=self._events)
        counts = np.zeros(self._events, np.int64)
        # Of each clock and processor: the number of its row.
        now = np.zeros((2, len(self.lengths)), np.int64)
        ready = np.flatnonzero(pending == 0)
        started = 0
        while len(ready):
            started += len(ready)
            processors = self.processor[ready]
            for which in ways:
                rows = self._met(which, now[which, processors], ready, *by_counters)
                now[which, processors] = self.clock[which, ready] = rows
            now[RAN, processors] = self._met(RAN, now[RAN, processors], ready, *by_packets)
            events = signals.of(ready)
            np.add.at(counts, events, 1)
            events = np.unique(events)
            met = [waiters.of(events[counts[events] == totals[events]])]
            if self._partial:
                met.append(self._meet_partial(events, counts))
            met.append(ready[self.position[ready] + 1 < self.lengths[processors]] + 1)
            reached = np.concatenate(met)
            np.subtract.at(pending, reached, 1)
            ready = np.unique(reached[pending[reached] == 0])
        if not len(packets):
            self.clock[SEEN] = self.clock[RAN]
        if started == nodes:
            return None
        return nodes - started, int(np.flatnonzero(pending > 0)[0])

    def _met(
        self,
        which: int,
        rows: np.ndarray,
        nodes: np.ndarray,
        needed: np.ndarray,
        sets: Sequence[tuple[int, ...]],
    ) -> np.ndarray:
        """For each task in `nodes`, the number of its vector clock after its waits (a row of the
        table of clocks). rows: the numbers of the clocks before the waits. needed: for each task,
        the number of the set of events for which it waits.
        """
        wait = np.flatnonzero(needed[nodes])
        if not len(wait):
            return rows
        codes = rows[wait] * len(sets) + needed[nodes[wait]]
        distinct, back = np.unique(codes, return_inverse=True)
        known = (divmod(code, len(sets)) for code in distinct.tolist())
        joined = [self._join(which, old, sets[number]) for old, number in known]
        rows = rows.copy()
        rows[wait] = np.array(joined, np.int64)[back.reshape(-1)]
        return rows

    def _meet_partial(self, events: np.ndarray, counts: np.ndarray) -> np.ndarray:
        met = []
        for event in events.tolist():
            listed = self._partial.get(event, [])
            while listed and listed[-1][0] <= counts[event]:
                met.append(listed.pop()[1])
        return np.array(met, np.int64)

    def _index_signals(self, signalled: np.ndarray) -> None:
        """Prepares for `_after`: for each event, the nodes that signal it, their processors, and on
        each processor the position after the last of these nodes.
        """
        event, node, rank = signalled.T
        at_home = self.processor[node]
        home = np.searchsorted(self.processors.starts, at_home, "right") - 1
        # Of ranks with equal work only one, `home`, is executed. So `node`, a task of `home`, may
        # stand for the corresponding task of `rank`. That task runs on the processor of `rank` with
        # the same index.
        start = self.processors.starts
        processor = at_home - start[home] + start[rank]
        end = self.position[node] + ~np.array(self._packet, bool)[event]
        order = np.lexsort((end, processor, event))
        event, processor, end = event[order], processor[order], end[order]
        last = np.ones(len(event), bool)
        last[:-1] = (event[1:] != event[:-1]) | (processor[1:] != processor[:-1])
        self._last = processor[last], end[last]
        self._last_starts = np.searchsorted(event[last], np.arange(self._events + 1)).tolist()
        self._members = node[order], rank[order]
        self._member_starts = np.searchsorted(event, np.arange(self._events + 1)).tolist()

    def _after(self, event: int, which: int) -> np.ndarray:
        """The vector clock of a task that has waited for all signals of an event. which: the clock
        RAN (tasks that have run) or SEEN (tasks whose writes are visible).
        """
        known = self._known_after.get((event, which))
        if known is not None:
            return known
        if len(self._known_after) == MAX_KNOWN_EVENTS:
            self._known_after.clear()
        row = np.zeros(self.rows.shape[1], self.rows.dtype)
        part = slice(self._member_starts[event], self._member_starts[event + 1])
        nodes, ranks = (values[part] for values in self._members)
        rows = self.clock[which, nodes].tolist()
        for other, rank in set(zip(rows, ranks.tolist(), strict=True)):
            columns = self._columns[rank]
            theirs = self.rows[other] if columns is None else self.rows[other][columns]
            np.maximum(row, theirs, out=row)
        part = slice(self._last_starts[event], self._last_starts[event + 1])
        processors, ends = (values[part] for values in self._last)
        row[processors] = np.maximum(row[processors], ends)
        self._known_after[event, which] = row
        return row

    def _join(self, which: int, row: int, events: Sequence[int]) -> int:
        """The number of the vector clock (a row of the table) of a task after it has waited for all
        of the events. row: the number of its clock before.
        """
        joined = self.rows[row].copy()
        for event in events:
            np.maximum(joined, self._after(event, which), out=joined)
        key = hash(joined.tobytes())
        number = self._numbers.get(key)
        if number is None or not np.array_equal(self.rows[number], joined):
            number = self._numbers[key] = self.known
            self.known += 1
            if number == len(self.rows):
                self.rows.resize((number + number // 4, len(joined)), refcheck=False)
            self.rows[number] = joined
        return number


class _Lists:
    """Lists of numbers, one for each key. They are built from an array with rows (key, number)."""

    def __init__(self, rows: np.ndarray, keys: int) -> None:
        order = np.argsort(rows[:, 0], kind="stable")
        self.values = rows[order, 1]
        self.starts = np.searchsorted(rows[order, 0], np.arange(keys + 1))

    def of(self, keys: np.ndarray) -> np.ndarray:
        """The lists of all the given keys, concatenated."""
        values: np.ndarray = self.values[spans(self.starts[keys], self.starts[keys + 1])]
        return values

    def distinct(self) -> tuple[np.ndarray, list[tuple[int, ...]]]:
        """Stores equal lists once. Returns the distinct lists, and for each key the index of its
        list among them. The empty list has index 0.
        """
        known: dict[tuple[int, ...], int] = {(): 0}
        numbers = np.zeros(len(self.starts) - 1, np.int64)
        values, starts = self.values.tolist(), self.starts.tolist()
        for key in np.flatnonzero(np.diff(self.starts)).tolist():
            listed = tuple(sorted(set(values[starts[key] : starts[key + 1]])))
            numbers[key] = known.setdefault(listed, len(known))
        return numbers, list(known)


def spans(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """The concatenation of the ranges first[i], ..., last[i] - 1 for all i."""
    many = last - first
    ends = np.cumsum(many)
    return np.asarray(
        np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - ends + many, many)
    )
