"""Second part of the verifier: what is certainly complete when a task starts.

A phase is executed abstractly, on all ranks at once: a task runs when the one before it on its
processor has run and its waits are met. Counters only grow, so if any execution comes to an end
this one does, and if it stops, every execution stops (no deadlock is missed, none is invented). A
wait for all of a counter's signals orders the task behind every one who signals; a lower threshold
lets an iteration start on any subset and orders nothing.

All tasks that can run do so in one step, with array operations. What is known are two rows of a
vector clock (Mattern 1989); tasks that know the same share them (a lane's knowledge of itself is
its position and left out), so rows grow with the different things that are waited for, not with
tasks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ark.plan.types import ITERATION_BARRIER
from ark.plan.verify.rank_set import RankSet, refuse

RAN, SEEN = 0, 1
Packets = tuple[np.ndarray, np.ndarray]  # producers, readers: each reader waits for all producers


@dataclass(frozen=True, eq=False)
class Order:
    """rows[clock[RAN, i], l]: how many tasks of lane l have certainly run before node i starts,
    were it on another lane; rows[clock[SEEN, i], l]: of how many it sees what they wrote. A packet
    proves that its producer ran, but brings no other memory along; a counter does both. Nodes and
    lanes are counted over all ranks; bases: the first node of each rank, and one past the last.
    """

    bases: np.ndarray
    lane: np.ndarray
    position: np.ndarray
    clock: np.ndarray
    rows: np.ndarray

    def before(self, earlier: np.ndarray, later: np.ndarray, which: np.ndarray | int) -> np.ndarray:
        """By pair of nodes: has the earlier one run (or is it seen, by `which`) by then?"""
        lane, position = self.lane[earlier], self.position[earlier]
        known = self.rows[self.clock[which, later], lane] > position
        own = (lane == self.lane[later]) & (position < self.position[later])
        return np.asarray(known | own)


def first_nodes(rank_set: RankSet, number: int) -> np.ndarray:
    """The first node of each rank, and one past the last."""
    lists = [rank_set.listing(rank, number) for rank in range(len(rank_set.plans))]
    return np.cumsum([0, *(len(listed.tasks) for listed in lists)])


def order_phase(
    rank_set: RankSet,
    number: int,
    packets: Sequence[Sequence[Packets]],
    between: Sequence[Packets] = (),
) -> Order:
    """Orders the phase; PlanError if counters do not add up or the execution stops.

    packets: by rank, in nodes of that rank. between: from rank to rank, in nodes of all.
    """
    lists = [rank_set.listing(rank, number) for rank in range(len(rank_set.plans))]
    bases = first_nodes(rank_set, number)
    lanes = np.cumsum([0, *(len(listed.lengths) for listed in lists)])
    run = _Run(
        np.concatenate([x.lane + at for x, at in zip(lists, lanes[:-1], strict=True)]),
        np.concatenate([x.position for x in lists]),
        np.concatenate([x.lengths for x in lists]),
    )
    counters = _Counters(rank_set, number, bases)
    counters.check()
    for event in sorted(counters.signals):
        run.event(counters.signals[event], counters.waits.get(event, []), False)
    for base, groups in zip(bases[:-1].tolist(), packets, strict=True):
        for producers, readers in groups:
            everyone = [(reader + base, len(producers)) for reader in readers.tolist()]
            run.event((producers + base).tolist(), everyone, True)
    for producers, readers in between:
        everyone = [(reader, len(producers)) for reader in readers.tolist()]
        run.event(producers.tolist(), everyone, True)
    stuck = run.execute()
    if stuck is not None:
        count, node = stuck
        rank = int(np.searchsorted(bases, node, "right")) - 1
        task = lists[rank].tasks[node - int(bases[rank])]
        raise refuse(
            f"its waits cannot all be met: {count} tasks never start, the first is tile "
            f"{list(task.coord)} of op {rank_set.plans[rank].ops[task.op].name!r} on rank {rank}"
        )
    order = Order(bases, run.lane, run.position, run.clock, run.rows[: run.known])
    _check_barrier(rank_set, order, counters, lanes, run.lengths)
    return order


class _Counters:
    """Who signals and who waits for each (rank, counter), in nodes over all ranks."""

    def __init__(self, rank_set: RankSet, number: int, bases: np.ndarray) -> None:
        self.rank_set = rank_set
        self.signals: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.waits: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self.bases = bases
        for rank, base in enumerate(bases[:-1].tolist()):
            listed = rank_set.listing(rank, number)
            owners = [rank_set.counter_of(rank, c.id) for c in rank_set.plans[rank].counters]
            for node, counter in np.add(listed.signals, (base, 0)).tolist():
                self.signals[owners[counter]].append(node)
            for node, counter, threshold in np.add(listed.waits, (base, 0, 0)).tolist():
                self.waits[rank, counter].append((node, threshold))

    def check(self) -> None:
        """Steps must be what is signalled in an iteration, and no wait may ask for more."""
        for rank, plan in enumerate(self.rank_set.plans):
            first, last = int(self.bases[rank]), int(self.bases[rank + 1])
            for counter in plan.counters:
                if counter.rank != rank:
                    continue
                key = (rank, counter.id)
                signals = self.signals.get(key, ())
                many = len(signals)
                if counter.id == ITERATION_BARRIER and many != plan.world_size:
                    raise refuse(
                        f"the iteration barrier of rank {rank} is signalled {many} times in an "
                        "iteration"
                    )
                if many and many != counter.step:
                    raise refuse(
                        f"counter {counter.name!r} of rank {rank} is signalled {many} times in an "
                        f"iteration, but its step is {counter.step}"
                    )
                waits = self.waits.get(key, ())
                if waits and not many:
                    raise refuse(
                        f"counter {counter.name!r} of rank {rank} is awaited, never signalled"
                    )
                if not counter.system and any(not first <= n < last for n in signals):
                    raise refuse(f"counter {counter.name!r} has signals of peers, but device scope")
                asked = max((threshold for _, threshold in waits), default=0)
                if asked > counter.step:
                    raise refuse(
                        f"counter {counter.name!r} of rank {rank} is awaited for {asked} of "
                        f"{counter.step} signals"
                    )


class _Run:
    """The abstract execution. An event is a counter or the packets that somebody reads."""

    def __init__(self, lane: np.ndarray, position: np.ndarray, lengths: np.ndarray) -> None:
        self.lane, self.position, self.lengths = lane, position, lengths
        nodes = len(lane)
        small = np.uint16 if lengths.max(initial=0) < 1 << 16 else np.uint32
        self.rows = np.zeros((64, len(lengths)), small)
        self.known = 1
        self.clock = np.zeros((2, nodes), np.int64)
        self._numbers: dict[int, int] = {hash(self.rows[0].tobytes()): 0}
        self._totals: list[int] = []
        self._packet: list[bool] = []
        self._signals: list[tuple[int, int]] = []  # node, event
        self._waits: list[tuple[int, int]] = []  # event, node: for all of the signals
        self._partial: dict[int, list[tuple[int, int]]] = {}  # thresholds and nodes, falling
        self._began: dict[tuple[int, int], set[int]] = {}
        self._signallers: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def event(self, signals: Sequence[int], waits: Sequence[tuple[int, int]], packet: bool) -> None:
        """Adds an event; waits: (node, threshold)."""
        number = len(self._totals)
        total = len(signals)
        self._totals.append(total)
        self._packet.append(packet)
        self._signallers.append(self._last(np.array(signals, np.int64)))
        self._signals += [(node, number) for node in signals]
        self._waits += [(number, node) for node, threshold in waits if threshold >= total]
        partial = sorted(((t, node) for node, t in waits if t < total), reverse=True)
        if partial:
            self._partial[number] = partial

    def execute(self) -> tuple[int, int] | None:
        """Runs everything; (how many tasks never start, the first of them) if it stops."""
        nodes = len(self.lane)
        signals = _Lists(np.array(self._signals, np.int64).reshape(-1, 2), nodes)
        waiting = np.array(self._waits, np.int64).reshape(-1, 2)
        waiters = _Lists(waiting, len(self._totals))
        counters = waiting[~np.array(self._packet, bool)[waiting[:, 0]]]
        needs = [_Lists(w[:, ::-1], nodes).distinct() for w in (waiting, counters)]
        pending = np.bincount(waiting[:, 1], minlength=nodes) + (self.position > 0)
        for listed in self._partial.values():
            np.add.at(pending, [node for _, node in listed], 1)
        totals = np.array(self._totals, np.int64)
        counts = np.zeros(len(totals), np.int64)
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

    def _last(self, members: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(nodes, the lanes of the last ones of each lane, the places behind these)."""
        if len(members) == 1:
            return members, self.lane[members], self.position[members] + 1
        lane, end = self.lane[members], self.position[members] + 1
        order = np.lexsort((end, lane))
        last = np.append(np.diff(lane[order]) > 0, True)
        return members, lane[order][last], end[order][last]

    def _known_by(self, event: int, which: int, members: np.ndarray) -> Iterable[int]:
        """The rows with which an event's signallers began."""
        if len(members) == 1:
            return (int(self.clock[which, members[0]]),)
        found = self._began.get((event, which))
        if found is None:
            found = self._began[event, which] = set(self.clock[which, members].tolist())
        return found

    def _join(self, which: int, row: int, events: Sequence[int]) -> int:
        """The row of who knew `row` and waited for all of some events."""
        made = self.rows[row].copy()
        for event in events:
            members, lanes, ends = self._signallers[event]
            for other in self._known_by(event, which, members):
                np.maximum(made, self.rows[other], out=made)
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


def _check_barrier(
    rank_set: RankSet, order: Order, counters: _Counters, lanes: np.ndarray, lengths: np.ndarray
) -> None:
    """Whoever opens the iteration barrier comes after everything its rank does before it."""
    for rank in range(len(rank_set.plans)):
        first, last = order.bases[rank], order.bases[rank + 1]
        mine: list[int] = []
        for other in range(len(rank_set.plans)):
            mine = [n for n in counters.signals[other, ITERATION_BARRIER] if first <= n < last]
            if len(mine) != 1:
                raise refuse(
                    f"rank {rank} must signal the iteration barrier of rank {other} once an "
                    "iteration"
                )
        own = slice(int(lanes[rank]), int(lanes[rank + 1]))
        for opener in {
            n
            for other in range(len(rank_set.plans))
            for n in counters.signals[other, ITERATION_BARRIER]
            if first <= n < last
        }:
            complete = order.rows[order.clock[SEEN, opener], own].astype(np.int64)
            complete[order.lane[opener] - own.start] = order.position[opener] + 1
            if (complete < lengths[own]).any():
                raise refuse(
                    f"the iteration barrier of rank {rank} opens before its iteration is complete"
                )
