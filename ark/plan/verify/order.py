"""Third part of the verifier: what is certainly complete when a task starts.

A phase is executed abstractly, on all ranks at once: a task runs when the one before it on its
processor has run and its waits are met. Counters only grow, so if any execution comes to an end
this one does, and if it stops, every execution stops (no deadlock is missed, none is invented). A
wait for all of a counter's signals orders the task behind every one who signals; a lower threshold
lets an iteration start on any subset and orders nothing.

Of ranks that do the same only one is executed: a step runs all tasks that can run, so their images
on the other ranks run in the same step, and know the same with the ranks renamed.

All tasks that can run do so in one step, with array operations. What is known are two rows of a
vector clock (Mattern 1989); tasks that know the same share them (a lane's knowledge of itself is
its position and left out), so rows grow with the different things that are waited for, not with
tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ark.plan.types import ITERATION_BARRIER
from ark.plan.verify.rank_set import RankSet, refuse

RAN, SEEN = 0, 1
Packets = tuple[np.ndarray, np.ndarray]  # producers, readers: each reader waits for all producers
Between = tuple[int, np.ndarray, int, np.ndarray]  # the same, each with its rank before


@dataclass(frozen=True, eq=False)
class Lanes:
    """The processors of all ranks, numbered one rank behind the other. starts: each rank's first,
    and one past the last; moved[r, q]: what to add to a lane of rank q to have it as r's twin sees
    it.
    """

    starts: np.ndarray
    moved: np.ndarray

    @classmethod
    def of(cls, rank_set: RankSet, lengths: Sequence[int]) -> Lanes:
        starts = np.cumsum([0, *lengths])
        moved = np.zeros((rank_set.world, rank_set.world), np.int64)
        for rank, renaming in enumerate(rank_set.symmetry.renaming):
            for old, new in enumerate(renaming):
                moved[rank, new] = starts[old] - starts[new]
        return cls(starts, moved)

    def seen_by(self, rank: int) -> np.ndarray | None:
        """By lane the one that it is for the rank's twin; None if that is the rank itself."""
        shift = np.repeat(self.moved[rank], np.diff(self.starts))
        return np.arange(len(shift)) + shift if shift.any() else None


@dataclass(frozen=True, eq=False)
class Order:
    """What has run, and what is seen, when a task starts. A packet proves that its producer ran,
    but brings no other memory along; a counter does both.

    Nodes and lanes are counted over all ranks; bases: the first node of each rank, and one past the
    last. rows[clock[RAN, i], l]: how many tasks of lane l have certainly run before node i of those
    that are executed starts, were it on another lane; with SEEN, of how many it sees what they
    wrote. home[r]: what to add to a node of rank r for its twin's among these.
    """

    bases: np.ndarray
    rank: np.ndarray
    lane: np.ndarray
    position: np.ndarray
    clock: np.ndarray
    rows: np.ndarray
    home: np.ndarray
    lanes: Lanes

    def clocks(self, which: np.ndarray | int, nodes: np.ndarray) -> np.ndarray:
        """The rows of nodes, as their twins know them."""
        return np.asarray(self.clock[which, nodes + self.home[self.rank[nodes]]])

    def known(self, rows: np.ndarray, earlier: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """By pair: is the earlier node in a row of a node of that rank?"""
        column = self.lane[earlier] + self.lanes.moved[rank, self.rank[earlier]]
        return np.asarray(self.rows[rows, column] > self.position[earlier])

    def before(self, earlier: np.ndarray, later: np.ndarray, which: np.ndarray | int) -> np.ndarray:
        """By pair of nodes: has the earlier one run (or is it seen, by `which`) by then?"""
        known = self.known(self.clocks(which, later), earlier, self.rank[later])
        own = (self.lane[earlier] == self.lane[later]) & (
            self.position[earlier] < self.position[later]
        )
        return np.asarray(known | own)


def first_nodes(rank_set: RankSet, number: int) -> np.ndarray:
    """The first node of each rank, and one past the last."""
    lists = [rank_set.listing(rank, number) for rank in range(rank_set.world)]
    return np.cumsum([0, *(len(listed.tasks) for listed in lists)])


def order_phase(
    rank_set: RankSet,
    number: int,
    packets: Sequence[Sequence[Packets]],
    between: Sequence[Between] = (),
) -> Order:
    """Orders the phase; PlanError if counters do not add up or the execution stops.

    packets: by checked rank, in nodes of that rank. between: from rank to checked rank.
    """
    lists = [rank_set.listing(rank, number) for rank in range(rank_set.world)]
    counts = np.array([len(listed.tasks) for listed in lists])
    bases = first_nodes(rank_set, number)
    lanes = Lanes.of(rank_set, [len(listed.lengths) for listed in lists])
    checked = list(rank_set.checked)
    firsts = np.cumsum([0, *counts[checked]])
    first = dict(zip(checked, firsts.tolist(), strict=False))
    rank = np.repeat(np.arange(rank_set.world), counts)
    lane = np.concatenate([x.lane + at for x, at in zip(lists, lanes.starts[:-1], strict=True)])
    position = np.concatenate([x.position for x in lists])
    executed = np.concatenate([np.arange(bases[r], bases[r + 1]) for r in checked])
    counters = counters_of(rank_set, number)
    counters.check(rank_set)
    run = Run(lane[executed], position[executed], np.concatenate([x.lengths for x in lists]), lanes)
    run.add_counters(counters)
    for owner, groups in zip(checked, packets, strict=True):
        for producers, readers in groups:
            run.add_packets(producers + first[owner], readers + first[owner], owner)
    for maker, producers, owner, readers in between:
        made = producers + first[rank_set.symmetry.twin[maker]]
        run.add_packets(made, readers + first[owner], maker)
    stuck = run.execute()
    if stuck is not None:
        count, node = stuck
        at = checked[int(np.searchsorted(firsts, node, "right")) - 1]
        task = lists[at].tasks[node - first[at]]
        raise refuse(
            f"its waits cannot all be met: {count} tasks never start, the first is tile "
            f"{list(task.coord)} of op {rank_set.plan(at).ops[task.op].name!r} on rank {at}"
        )
    home = np.array([first[t] for t in rank_set.symmetry.twin]) - bases[:-1]
    order = Order(bases, rank, lane, position, run.clock, run.rows[: run.known], home, lanes)
    for at in checked:
        _check_barrier(rank_set, order, number, at)
    return order


@dataclass(frozen=True, eq=False)
class Counters:
    """Who signals and who waits for each counter of a checked rank. Counters are numbered one rank
    behind the other, rank r's from offsets[r]. Rows of `signals` are (counter, executed node, rank
    on which its image signals), of `waits` (counter, executed node, threshold).
    """

    offsets: dict[int, int]
    signals: np.ndarray
    waits: np.ndarray

    def check(self, rank_set: RankSet) -> None:
        """Steps must be what is signalled in an iteration, and no wait may ask for more."""
        total = sum(len(plan.counters) for plan in rank_set.checked_plans)
        many = np.bincount(self.signals[:, 0], minlength=total)
        asked = np.full(total, -1)
        np.maximum.at(asked, self.waits[:, 0], self.waits[:, 2])
        for plan in rank_set.checked_plans:
            at = self.offsets[plan.rank]
            part = slice(at, at + len(plan.counters))
            step = np.array([c.step for c in plan.counters], np.int64)
            own = np.array([c.rank == plan.rank for c in plan.counters])
            system = np.array([c.system for c in plan.counters])
            far = np.zeros(len(plan.counters), bool)
            foreign = self.signals[self.signals[:, 2] != plan.rank, 0] - at
            far[foreign[(foreign >= 0) & (foreign < len(far))]] = True
            wrong = (many[part] > 0) & (many[part] != step)
            wrong |= ((asked[part] >= 0) & (many[part] == 0)) | (asked[part] > step)
            wrong |= far & ~system
            wrong[ITERATION_BARRIER] |= many[at + ITERATION_BARRIER] != step[ITERATION_BARRIER]
            for i in np.flatnonzero(wrong & own)[:1].tolist():
                self._refuse(rank_set, plan.rank, i, int(many[at + i]), int(asked[at + i]))

    def _refuse(self, rank_set: RankSet, rank: int, number: int, many: int, asked: int) -> None:
        counter = rank_set.plan(rank).counters[number]
        what = f"counter {counter.name!r} of rank {rank}"
        if number == ITERATION_BARRIER and many != counter.step:
            raise refuse(
                f"the iteration barrier of rank {rank} is signalled {many} times in an iteration"
            )
        if many and many != counter.step:
            raise refuse(
                f"{what} is signalled {many} times in an iteration, but its step is {counter.step}"
            )
        if asked >= 0 and not many:
            raise refuse(f"{what} is awaited, never signalled")
        if asked > counter.step:
            raise refuse(f"{what} is awaited for {asked} of {counter.step} signals")
        raise refuse(f"{what} has signals of peers, but device scope")


def counters_of(rank_set: RankSet, number: int) -> Counters:
    """The counters of a phase, whose executed nodes are those of the checked ranks."""
    offsets, first, total, nodes = {}, {}, 0, 0
    for plan in rank_set.checked_plans:
        offsets[plan.rank], first[plan.rank] = total, nodes
        total += len(plan.counters)
        nodes += len(rank_set.listing(plan.rank, number).tasks)
    signals, waits = [], []
    owners = {}
    for plan in rank_set.checked_plans:
        named = [rank_set.counter_of(plan.rank, c.id) for c in plan.counters]
        owners[plan.rank] = np.array(named, np.int64).reshape(-1, 2)
        listed = rank_set.listing(plan.rank, number)
        waits.append(listed.waits[:, [1, 0, 2]] + [offsets[plan.rank], first[plan.rank], 0])
    start = np.array([offsets.get(rank, -1) for rank in range(rank_set.world)])
    for rank, twin in enumerate(rank_set.symmetry.twin):
        node, counter = rank_set.listing(rank, number).signals.T
        owner, there = owners[twin][counter].T
        owner = np.array(rank_set.symmetry.renaming[rank])[owner]
        kept = start[owner] >= 0
        node, owner, there = node[kept], owner[kept], there[kept]
        rows = (start[owner] + there, node + first[twin], np.full(len(node), rank))
        signals.append(np.stack(rows, axis=1))
    return Counters(offsets, np.concatenate(signals), np.concatenate(waits))


class Run:
    """The abstract execution. An event is a counter or the packets that somebody reads."""

    def __init__(
        self, lane: np.ndarray, position: np.ndarray, lengths: np.ndarray, lanes: Lanes
    ) -> None:
        self.lane, self.position, self.lengths = lane, position, lengths
        self.lanes = lanes
        small = np.uint16 if lengths.max(initial=0) < 1 << 16 else np.uint32
        self.rows = np.zeros((64, len(lengths)), small)
        self.known = 1
        self.clock = np.zeros((2, len(lane)), np.int64)
        self._numbers: dict[int, int] = {hash(self.rows[0].tobytes()): 0}
        self._events = 0
        self._packet: list[bool] = []
        self._signals: list[np.ndarray] = []  # event, node, rank
        self._waits: list[np.ndarray] = []  # event, node: for all of the signals
        self._partial: dict[int, list[tuple[int, int]]] = {}  # thresholds and nodes, falling
        self._began: dict[tuple[int, int], set[tuple[int, int]]] = {}
        self._columns = [lanes.seen_by(rank) for rank in range(len(lanes.moved))]

    def add_counters(self, counters: Counters) -> None:
        """An event for each counter that is signalled. Waits for the iteration before are met."""
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

    def add_packets(self, producers: np.ndarray, readers: np.ndarray, rank: int) -> None:
        """An event for packets: all readers wait for all producers, of one rank."""
        signals = np.full((len(producers), 3), (self._events, 0, rank))
        signals[:, 1] = producers
        self._signals.append(signals)
        waits = np.full((len(readers), 2), self._events)
        waits[:, 1] = readers
        self._waits.append(waits)
        self._events += 1
        self._packet.append(True)

    def execute(self) -> tuple[int, int] | None:
        """Runs everything; (how many tasks never start, the first of them) if it stops."""
        nodes = len(self.lane)
        signalled = np.concatenate([*self._signals, np.zeros((0, 3), np.int64)])
        waiting = np.concatenate([*self._waits, np.zeros((0, 2), np.int64)])
        self._index_signals(signalled)
        signals = _Lists(signalled[:, [1, 0]], nodes)
        waiters = _Lists(waiting, self._events)
        counters = waiting[~np.array(self._packet, bool)[waiting[:, 0]]]
        needs = [_Lists(w[:, ::-1], nodes).distinct() for w in (waiting, counters)]
        pending = np.bincount(waiting[:, 1], minlength=nodes) + (self.position > 0)
        for listed in self._partial.values():
            np.add.at(pending, [node for _, node in listed], 1)
        totals = np.bincount(signalled[:, 0], minlength=self._events)
        counts = np.zeros(self._events, np.int64)
        now = np.zeros((2, len(self.lengths)), np.int64)  # the rows of each lane
        ready = np.flatnonzero(pending == 0)
        started = 0
        while len(ready):
            started += len(ready)
            lanes = self.lane[ready]
            for which, (needed, sets) in enumerate(needs):
                rows = now[which, lanes]
                wait = np.flatnonzero(needed[ready])
                if len(wait):
                    codes = rows[wait] * len(sets) + needed[ready[wait]]
                    distinct, back = np.unique(codes, return_inverse=True)
                    known = (divmod(code, len(sets)) for code in distinct.tolist())
                    joined = [self._join(which, old, sets[number]) for old, number in known]
                    rows[wait] = np.array(joined, np.int64)[back]
                now[which, lanes] = self.clock[which, ready] = rows
            events = signals.of(ready)
            np.add.at(counts, events, 1)
            events = np.unique(events)
            met = [waiters.of(events[counts[events] == totals[events]])]
            if self._partial:
                met.append(self._meet_partial(events, counts))
            met.append(ready[self.position[ready] + 1 < self.lengths[lanes]] + 1)
            reached = np.concatenate(met)
            np.subtract.at(pending, reached, 1)
            ready = np.unique(reached[pending[reached] == 0])
        if started == nodes:
            return None
        return nodes - started, int(np.flatnonzero(pending > 0)[0])

    def _meet_partial(self, events: np.ndarray, counts: np.ndarray) -> np.ndarray:
        found = []
        for event in events.tolist():
            listed = self._partial.get(event, [])
            while listed and listed[-1][0] <= counts[event]:
                found.append(listed.pop()[1])
        return np.array(found, np.int64)

    def _index_signals(self, signalled: np.ndarray) -> None:
        """By event who signals, and behind which places of which lanes they are the last."""
        event, node, rank = signalled.T
        at_home = self.lane[node]
        home = np.searchsorted(self.lanes.starts, at_home, "right") - 1
        # The lane of the image: what the twin has as its own, the rank has as this one.
        start = self.lanes.starts
        lane = at_home - start[home] + start[rank]
        end = self.position[node] + 1
        order = np.lexsort((end, lane, event))
        event, lane, end = event[order], lane[order], end[order]
        last = np.ones(len(event), bool)
        last[:-1] = (event[1:] != event[:-1]) | (lane[1:] != lane[:-1])
        self._last = lane[last], end[last]
        self._last_starts = np.searchsorted(event[last], np.arange(self._events + 1)).tolist()
        self._members = node[order], rank[order]
        self._member_starts = np.searchsorted(event, np.arange(self._events + 1)).tolist()

    def _known_by(self, event: int, which: int) -> Iterable[tuple[int, int]]:
        """The rows with which an event's signallers began, as their twins, and their ranks."""
        found = self._began.get((event, which))
        if found is None:
            part = slice(self._member_starts[event], self._member_starts[event + 1])
            nodes, ranks = (values[part] for values in self._members)
            rows = self.clock[which, nodes].tolist()
            found = self._began[event, which] = set(zip(rows, ranks.tolist(), strict=True))
        return found

    def _join(self, which: int, row: int, events: Sequence[int]) -> int:
        """The row of who knew `row` and waited for all of some events."""
        made = self.rows[row].copy()
        for event in events:
            for other, rank in self._known_by(event, which):
                columns = self._columns[rank]
                theirs = self.rows[other] if columns is None else self.rows[other][columns]
                np.maximum(made, theirs, out=made)
            part = slice(self._last_starts[event], self._last_starts[event + 1])
            lanes, ends = (values[part] for values in self._last)
            made[lanes] = np.maximum(made[lanes], ends)
        key = hash(made.tobytes())
        number = self._numbers.get(key)
        if number is None or not np.array_equal(self.rows[number], made):
            number = self._numbers[key] = self.known
            self.known += 1
            if number == len(self.rows):
                self.rows.resize((number + number // 4, len(made)), refcheck=False)
            self.rows[number] = made
        return number


class _Lists:
    """Lists of numbers by key, from rows of (key, number)."""

    def __init__(self, rows: np.ndarray, keys: int) -> None:
        order = np.argsort(rows[:, 0], kind="stable")
        self.values = rows[order, 1]
        self.starts = np.searchsorted(rows[order, 0], np.arange(keys + 1))

    def of(self, keys: np.ndarray) -> np.ndarray:
        """All numbers of some keys."""
        return self.values[spans(self.starts[keys], self.starts[keys + 1])]

    def distinct(self) -> tuple[np.ndarray, list[tuple[int, ...]]]:
        """By key the number of its list among the different lists; the empty one is 0."""
        known: dict[tuple[int, ...], int] = {(): 0}
        found = np.zeros(len(self.starts) - 1, np.int64)
        values, starts = self.values.tolist(), self.starts.tolist()
        for key in np.flatnonzero(np.diff(self.starts)).tolist():
            listed = tuple(sorted(set(values[starts[key] : starts[key + 1]])))
            found[key] = known.setdefault(listed, len(known))
        return found, list(known)


def spans(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """All numbers from first[i] to last[i], one range behind the other."""
    many = last - first
    ends = np.cumsum(many)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - ends + many, many)


def _check_barrier(rank_set: RankSet, order: Order, number: int, rank: int) -> None:
    """Whoever opens the iteration barrier comes after everything its rank does before it."""
    first = int(order.bases[rank])
    together = rank_set.plan(rank).counters[ITERATION_BARRIER].step
    others = range(rank_set.world) if together > 1 else (rank,)
    several = rank_set.world == 1  # one rank's tasks may open it together
    openers: dict[int, list[int]] = {other: [] for other in others}
    named = [rank_set.counter_of(rank, c.id) for c in rank_set.plans[rank].counters]
    for node, counter in rank_set.listing(rank, number).signals.tolist():
        owner, there = named[counter]
        if there == ITERATION_BARRIER:
            openers.setdefault(owner, []).append(node + first)
    own = slice(int(order.lanes.starts[rank]), int(order.lanes.starts[rank + 1]))
    lengths = rank_set.listing(rank, number).lengths
    for other, nodes in openers.items():
        if len(nodes) != 1 and not (several and nodes):
            raise refuse(
                f"rank {rank} must signal the iteration barrier of rank {other} once an iteration"
            )
        rows = order.rows[np.unique(order.clocks(SEEN, np.array(nodes))), own]
        complete = rows.max(axis=0).astype(np.int64)
        np.maximum.at(complete, order.lane[nodes] - own.start, order.position[nodes] + 1)
        if (complete < lengths).any():
            raise refuse(
                f"the iteration barrier of rank {rank} opens before its iteration is complete"
            )
