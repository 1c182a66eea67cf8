"""Finds paths of TACCL's chunks around full links. If the shortest paths lack capacity, longer
paths can be faster.

If all shortest paths of a sketch cross one slow link, no choice among them is fast. This module
builds each chunk's path link by link. The next link is always the one over which the chunk arrives
soonest, given the loads of the paths that were chosen before. The model may use these paths too
(`ark.collective.taccl.routing`).
"""

from __future__ import annotations

import heapq
import time
from itertools import pairwise

import numpy as np

from ark.collective.taccl.choices import Choices


def add_detours(choices: Choices, deadline: float) -> list[bool] | None:
    """Allows every leader an additional path, of any length, which is chosen by the links' loads.

    Returns these paths as a solution. Returns None, and changes nothing, if the model is so small
    that it allows detours anyway, if a symmetry maps a leader to itself, or if `deadline` (by
    time.monotonic()) passes.
    """
    if choices.slack or any(choices.stabilisers.values()):
        return None
    ways = _least_loaded(choices, deadline)
    return None if ways is None else choices.allow(ways)


def _least_loaded(choices: Choices, deadline: float) -> dict[int, list[int]] | None:
    """Returns, for the chunk of each leader, the links of the tree by which it reaches all ranks
    that need it, each link after the link to its sender. Returns None if there is no path for a
    chunk, or if `deadline` (by time.monotonic()) passes. No symmetry may map a leader to itself.
    """
    loads = _Loads(choices)
    ways: dict[int, list[int]] = {}
    for number in choices.leaders:
        links = _grow(choices, loads, number)
        if links is None or time.monotonic() > deadline:
            return None
        ways[number] = links
    return ways


class _Loads:
    """The load of every physical link: the time in ticks for which the routes chosen so far, and
    their images under the symmetries, occupy the link.
    """

    def __init__(self, choices: Choices) -> None:
        capacity = choices.graph.topology.capacities()
        place = {hop: i for i, hop in enumerate(capacity)}
        ns = choices.chunk_bytes / np.array([float(gbps) for gbps in capacity.values()])
        ticks = ns / choices.tick_ns
        images = np.array([choices.moved[p] for p in choices.elements])
        self._orbit = images.min(axis=0)
        self._held: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for orbit in map(int, np.unique(self._orbit)):
            crossed = [
                place[hop]
                for i in images[:, orbit]
                for hop in pairwise(choices.edges[int(i)].route)
            ]
            links, times = np.unique(crossed, return_counts=True)
            self._held[orbit] = links, times * ticks[links]
        self._now = np.zeros(len(place))

    def after(self, edge: int) -> float:
        """Returns the largest load of a physical link if a logical link and its images are used
        once more.
        """
        links, ticks = self._held[int(self._orbit[edge])]
        return float((self._now[links] + ticks).max())

    def add(self, edge: int) -> None:
        """Counts one more use of a logical link and its images."""
        links, ticks = self._held[int(self._orbit[edge])]
        self._now[links] += ticks


def _grow(choices: Choices, loads: _Loads, number: int) -> list[int] | None:
    """Finds the links over which one chunk travels (a tree, or a path in an all-to-all), and adds
    them to the loads. None if there are none.
    """
    chunk = choices.chunks[number]
    arrival = {chunk.owner: 0.0}
    through: dict[int, int] = {}
    heap: list[tuple[float, float, int]] = []

    def offer(rank: int) -> None:
        for i in choices.out[rank]:
            edge = choices.edges[i]
            if edge.dst not in arrival and choices.permitted(chunk, edge):
                ends = arrival[rank] + choices.cost[i]
                heapq.heappush(heap, (max(ends, loads.after(i)), ends, i))

    offer(chunk.owner)
    while heap and chunk.wanted_by not in arrival:
        known, ends, i = heapq.heappop(heap)
        to = choices.edges[i].dst
        if to in arrival:
            continue
        now = max(ends, loads.after(i))
        if now > known:  # this tree itself has loaded the link since
            heapq.heappush(heap, (now, ends, i))
            continue
        arrival[to] = ends
        through[to] = i
        if chunk.wanted_by < 0:
            loads.add(i)
        offer(to)
    if chunk.wanted_by < 0:
        return list(through.values()) if len(arrival) == choices.graph.ranks else None
    if chunk.wanted_by not in arrival:
        return None
    path = []
    rank = chunk.wanted_by
    while rank != chunk.owner:
        path.append(through[rank])
        loads.add(through[rank])
        rank = choices.edges[through[rank]].src
    return path[::-1]
