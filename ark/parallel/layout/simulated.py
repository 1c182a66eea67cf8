"""Finds the conversion of a layout that takes the least time on a real network, according to the
simulator of collectives.

The time of a step depends on which devices communicate, so the search (Dijkstra) is over layouts
together with the devices' positions. Each step is simulated with all its groups of devices at the
same time. Collectives are simulated as rings, an all-to-all as puts (one-sided writes) to every
peer. Called by `ark layout --topology`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from ark.collective.programs import OUT, ProgramBuilder, Span
from ark.collective.simulate import simulate
from ark.collective.topology import Topology
from ark.errors import InvalidUsageError, UnsupportedError
from ark.parallel.layout.moves import Step, groups, moved, moves, operation, ring_volume
from ark.parallel.layout.types import Layout

MOST_SIMULATIONS = 2000
Groups = tuple[tuple[int, ...], ...]


class StepTimes:
    """A cache of the simulated times of steps on a topology, in microseconds."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._known: dict[tuple[str, Groups, int], float] = {}

    def us(self, op: str, concurrent: Groups, block_bytes: int) -> float:
        """The time in microseconds of a step in which all groups of devices run the same collective
        at once. block_bytes: bytes of a device's block before the step.
        """
        if op in ("slice", "value_split"):
            return 0.0
        key = (op, concurrent, block_bytes)
        if key not in self._known:
            if len(self._known) == MOST_SIMULATIONS:
                raise UnsupportedError(
                    f"the search on {self.topology.name} needs more than {MOST_SIMULATIONS} "
                    "simulated steps; omit --topology, or use fewer devices"
                )
            self._known[key] = self._simulate(op, concurrent, block_bytes)
        return self._known[key]

    def _simulate(self, op: str, concurrent: Groups, block_bytes: int) -> float:
        count, ranks = len(concurrent[0]), len(self.topology.ranks)
        chunks = count * ranks
        builder = ProgramBuilder(op, "all_reduce", ranks, chunks)
        for group in concurrent:
            if op == "all_to_all":
                for rank, peer in itertools.permutations(group, 2):
                    slot = Span(OUT, group.index(rank), 1)
                    builder.put(rank, peer, Span("in", group.index(peer), 1), slot)
                continue
            hops = (count - 1) * (2 if op == "all_reduce" else 1)
            for hop in range(hops):
                for i, rank in enumerate(group):
                    slot = Span(OUT, (i - hop) % count, 1)
                    builder.put(rank, group[(i + 1) % count], slot, slot)
        part = block_bytes if op == "all_gather" else -(-block_bytes // count)
        return simulate(builder.build(), self.topology, part * chunks).time_us


def change_on(
    topology: Topology, shape: Sequence[int], before: Layout, after: Layout, itemsize: int
) -> tuple[list[Step], list[float]]:
    """The steps of the least time on a topology, and the microseconds of each.

    itemsize: bytes of an element. Rank i of the topology is device i of `before`.

    Raises InvalidUsageError if the number of devices of the layouts differs from the topology's
    number of ranks, or if the layouts do not divide the shape. Raises UnsupportedError if there are
    too many steps to simulate.
    """
    ranks = len(topology.ranks)
    if not before.devices == after.devices == ranks:
        raise InvalidUsageError(
            f"{before} is a layout over {before.devices} devices, {after} over {after.devices}, "
            f"and {topology.name} has {ranks} ranks; the three numbers must be equal"
        )
    before.block(shape)
    after.block(shape)
    times, order = StepTimes(topology), itertools.count()
    start = before.coordinates()
    queue: list[tuple[float, int, int, Layout, np.ndarray, tuple[tuple[Step, float], ...]]] = [
        (0.0, 0, next(order), before, start, ())
    ]
    done: set[tuple[tuple[int, ...], bytes]] = set()
    while queue:
        us, _, _, layout, coordinates, path = heapq.heappop(queue)
        if layout == after:
            return [step for step, _ in path], [time for _, time in path]
        key = (layout.counts, coordinates.tobytes())
        if key in done:
            continue
        done.add(key)
        held = layout.elements(shape)
        for source, target, factor, counts in moves(layout):
            neighbour = Layout(counts[0], counts[1], tuple(counts[2:]))
            if any(n % parts for n, parts in zip(shape, neighbour.dims, strict=True)):
                continue
            op = operation(source, target) or ""
            concurrent = groups(coordinates, source, factor)
            time = times.us(op, concurrent, held * itemsize)
            volume = ring_volume(op, factor, held) / factor
            step = Step(op, source, target, factor, volume, layout, neighbour, concurrent)
            place = moved(coordinates, source, target, factor)
            further = (*path, (step, time))
            entry = (us + time, len(further), next(order), neighbour, place, further)
            heapq.heappush(queue, entry)
    raise AssertionError("unreachable: every layout leads to every other")
