"""Finds the cheapest sequence of collectives that converts one layout to another, and the costs of
conversion between all layouts.

It computes shortest paths over the moves of ark.parallel.layout.moves, by Bellman-Ford on arrays.
Each round relaxes all moves of all layouts at once, for one source or for all sources. Few rounds
suffice, because paths are short.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ark.errors import InvalidUsageError, UnsupportedError
from ark.parallel.layout.moves import Step, groups, moved, moves, operation, ring_volume
from ark.parallel.layout.types import Layout, layouts

MOST_LAYOUTS = 20_000
LAYOUTS_PER_ROUND = 16  # source layouts per round; so few that arrays stay in the cache
FAR = np.int64(1) << 62
COST_PER_VOLUME = 64  # cost of a unit of volume; a step costs 1, so the shorter of equal paths wins


@dataclass(frozen=True)
class Table:
    """The costs between all layouts of a tensor over a number of devices.

    elements[i, j]: the number of elements that each device sends to convert layouts[i] to
    layouts[j], by the formulas for rings; float64.
    """

    layouts: tuple[Layout, ...]
    elements: np.ndarray


class _Moves:
    """All layouts, and the moves between them as arrays, sorted by the layout that a move results
    in.
    """

    def __init__(self, shape: Sequence[int], devices: int) -> None:
        self.layouts: list[Layout] = []
        for layout in layouts(shape, devices):
            self.layouts.append(layout)
            if len(self.layouts) > MOST_LAYOUTS:
                raise UnsupportedError(
                    f"a tensor of shape {list(shape)} has more than {MOST_LAYOUTS} layouts over "
                    f"{devices} devices, the limit of the search; use fewer devices or dimensions"
                )
        # All volumes of communication are integer multiples of this number of elements, so they are
        # counted in it.
        self.unit = Fraction(math.prod(shape), devices * devices)
        self.number = {layout.counts: i for i, layout in enumerate(self.layouts)}
        all_moves = []
        for i, layout in enumerate(self.layouts):
            local = devices // math.prod(layout.dims)
            for source, target, factor, counts in moves(layout):
                end = self.number.get(counts)
                if end is not None:
                    op = operation(source, target) or ""
                    volume = ring_volume(op, factor, local) * (devices // factor)
                    all_moves.append((end, i, volume * COST_PER_VOLUME + 1, source, target, factor))
        all_moves.sort()
        rows = np.array(all_moves, np.int64).reshape(-1, 6)
        self.ends, self.starts, self.costs = rows[:, 0], rows[:, 1], rows[:, 2]
        self.kinds = rows[:, 3:]
        self.reached, self.first = np.unique(self.ends, return_index=True)

    def distances(self, sources: Sequence[int]) -> np.ndarray:
        """The least cost from each source to each layout, as an array (layouts, sources)."""
        best = np.full((len(self.layouts), len(sources)), FAR)
        best[list(sources), np.arange(len(sources))] = 0
        costs = self.costs[:, None]
        while len(self.ends):
            through = np.minimum.reduceat(best[self.starts] + costs, self.first, axis=0)
            better = np.minimum(best[self.reached], through)
            if np.array_equal(better, best[self.reached]):
                break
            best[self.reached] = better
        return best


def table(shape: Sequence[int], devices: int) -> Table:
    """The costs between all layouts of a tensor of `shape` over `devices` devices.

    Raises UnsupportedError if there are more than MOST_LAYOUTS layouts.

    Examples:
        >>> ark.parallel.table((64, 64), 4).elements.shape  # between ten layouts
        (10, 10)
    """
    graph = _Moves(shape, devices)
    count = len(graph.layouts)
    parts = [
        range(at, min(at + LAYOUTS_PER_ROUND, count)) for at in range(0, count, LAYOUTS_PER_ROUND)
    ]
    distances = np.concatenate([graph.distances(part) for part in parts], axis=1)
    return Table(tuple(graph.layouts), distances.T // COST_PER_VOLUME * float(graph.unit))


def change(shape: Sequence[int], before: Layout, after: Layout) -> list[Step]:
    """The steps with the least ring volume from one layout to another.

    If several paths have this volume, the one with the fewest steps is returned. At the start,
    device i holds block i of the layout `before`. The block that a device holds at the end follows
    from the groups of the steps. Raises InvalidUsageError if the layouts are of different numbers
    of devices.

    Examples:
        >>> before, after = map(ark.parallel.Layout.parse, ("R1V4D1,1", "R4V1D1,1"))
        >>> [(step.op, step.elements) for step in ark.parallel.change((64, 64), before, after)]
        [('all_reduce', 6144.0)]
    """
    if before.devices != after.devices:
        raise InvalidUsageError(
            f"{before} is a layout over {before.devices} devices and {after} over "
            f"{after.devices}; both must have the same number of devices"
        )
    before.block(shape)
    after.block(shape)
    graph = _Moves(shape, before.devices)
    start, at = graph.number[before.counts], graph.number[after.counts]
    best = graph.distances([start])[:, 0]
    path = []
    while at != start:
        into = np.flatnonzero(graph.ends == at)
        edge = into[np.argmin(best[graph.starts[into]] + graph.costs[into])]
        path.append(graph.kinds[edge].tolist())
        at = int(graph.starts[edge])
    return _realised(shape, before, path[::-1])


def _realised(shape: Sequence[int], layout: Layout, path: list[list[int]]) -> list[Step]:
    """The steps of a path through layouts: for each step the collective, its volume and its groups
    of devices.
    """
    steps = []
    coordinates = layout.coordinates()
    for source, target, factor in path:
        op = operation(source, target) or ""
        counts = list(layout.counts)
        counts[source] //= factor
        counts[target] *= factor
        after = Layout(counts[0], counts[1], tuple(counts[2:]))
        volume = Fraction(ring_volume(op, factor, layout.elements(shape)), factor)
        step = Step(op, source, target, factor, float(volume), layout, after)
        steps.append(dataclasses.replace(step, groups=groups(coordinates, source, factor)))
        coordinates = moved(coordinates, source, target, factor)
        layout = after
    return steps
