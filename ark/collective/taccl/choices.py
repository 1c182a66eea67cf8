"""The variables of stage 1 of TACCL: each states whether a chunk crosses a logical link (a
connection of two ranks by a fixed route). An orbit is a set of chunks that the sketch's symmetries
map to each other. The chunks of an orbit share their variables: only one of them, its leader, has
its own. `ark.collective.taccl.routing` builds a model of these variables.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ark.collective.taccl.logical import Edge, Logical, Permutation, symmetries
from ark.errors import ModelError

# With at most this number of variables, paths may be one link longer than the shortest path.
_MAX_WIDE_MODEL_VARIABLES = 6000


@dataclass(frozen=True)
class Chunk:
    """A chunk of data: number `index` of the data of rank `owner`. wanted_by: the rank that needs
    it; -1 for all ranks.
    """

    owner: int
    wanted_by: int
    index: int


def chunks_of(graph: Logical, all_to_all: bool) -> tuple[Chunk, ...]:
    """All chunks of a collective: those of an all-gather or, if `all_to_all`, the chunks that each
    rank sends to each other rank.
    """
    parts = range(graph.sketch.input_chunkup)
    ranks = range(graph.ranks)
    if all_to_all:
        return tuple(Chunk(s, d, j) for s in ranks for d in ranks if s != d for j in parts)
    return tuple(Chunk(s, -1, j) for s in ranks for j in parts)


class Choices:
    """The numbered variables of the model.

    `table[chunk, edge]` is the variable's number, or -1 if the chunk may not cross the link.
    `leaders` are the chunks that have their own variables. `stabilisers` are the symmetries that
    map a leader to itself; they make some of its variables equal. `cost` is the number of ticks
    that a chunk takes on a link. A tick is `tick_ns` nanoseconds.
    """

    def __init__(self, graph: Logical, chunks: tuple[Chunk, ...], chunk_bytes: float) -> None:
        self.graph, self.chunks = graph, chunks
        self.edges = graph.edges
        self.into: list[list[int]] = [[] for _ in range(graph.ranks)]
        self.out: list[list[int]] = [[] for _ in range(graph.ranks)]
        for i, edge in enumerate(self.edges):
            self.into[edge.dst].append(i)
            self.out[edge.src].append(i)
        costs = [e.alpha_us * 1e3 + chunk_bytes / e.gbps for e in self.edges]
        # A tick is a nanosecond, or longer if sums of long times could overflow otherwise.
        self.tick_ns = max(1.0, max(costs, default=0.0) / 1e8)
        self.cost = [max(1, round(cost / self.tick_ns)) for cost in costs]
        self.chunk_bytes = chunk_bytes
        self.hops = [self._distances(rank, self.out) for rank in range(graph.ranks)]
        self._demand_routes()
        self.elements = symmetries(graph)
        self._find_leaders()
        pair = {(e.src, e.dst): i for i, e in enumerate(self.edges)}
        self.moved = {
            p: np.array([pair[p[e.src], p[e.dst]] for e in self.edges], int) for p in self.elements
        }
        self.slack = 1
        if (
            sum(self._allowed(c, self.slack).sum() for c in self.leaders)
            > _MAX_WIDE_MODEL_VARIABLES
        ):
            self.slack = 0
        self._fill_table({})

    def allow(self, ways: dict[int, list[int]]) -> list[bool]:
        """Allows each leader an additional path of any length, given as a list of links. Returns
        these paths as a solution of the model: one boolean per variable.
        """
        self._fill_table(ways)
        used = [False] * self.variables
        for number, links in ways.items():
            for i in links:
                used[self.table[number, i]] = True
        return used

    def allow_none(self) -> None:
        """Removes the paths that the last call of `allow` added."""
        self._fill_table({})

    def _distances(self, start: int, ways: list[list[int]]) -> list[float]:
        away = [math.inf] * self.graph.ranks
        away[start] = 0
        queue = deque([start])
        while queue:
            rank = queue.popleft()
            for i in ways[rank]:
                edge = self.edges[i]
                other = edge.dst if edge.src == rank else edge.src
                if away[other] == math.inf:
                    away[other] = away[rank] + 1
                    queue.append(other)
        return away

    def _demand_routes(self) -> None:
        for chunk in self.chunks:
            targets = range(self.graph.ranks) if chunk.wanted_by < 0 else [chunk.wanted_by]
            for rank in targets:
                if self.hops[chunk.owner][rank] == math.inf:
                    raise ModelError(self._no_route(chunk.owner, rank))

    def _no_route(self, owner: int, rank: int) -> str:
        return (
            f"The sketch forbids every route from rank {owner} to rank {rank} in "
            f"{self.graph.topology.name}; allow more connections inside or between boxes."
        )

    def permitted(self, chunk: Chunk, edge: Edge) -> bool:
        """True if the sketch allows the chunk to cross the link."""
        size = self.graph.per_box
        if edge.dst == chunk.owner or edge.src == chunk.wanted_by:
            return False
        if edge.sender is None or edge.src // size != chunk.owner // size:
            return True
        return self.graph.sketch.leaves_through(chunk.owner % size, edge.sender)

    def _allowed(self, number: int, slack: int) -> np.ndarray:
        """The links that a chunk may cross: those that the sketch allows, on paths at most `slack`
        links longer than the shortest path.
        """
        chunk = self.chunks[number]
        usable = [i for i, e in enumerate(self.edges) if self.permitted(chunk, e)]
        ways_out: list[list[int]] = [[] for _ in range(self.graph.ranks)]
        ways_in: list[list[int]] = [[] for _ in range(self.graph.ranks)]
        for i in usable:
            ways_out[self.edges[i].src].append(i)
            ways_in[self.edges[i].dst].append(i)
        away = self._distances(chunk.owner, ways_out)
        result = np.zeros(len(self.edges), bool)
        if chunk.wanted_by < 0:
            if math.inf in away:
                raise ModelError(self._no_route(chunk.owner, away.index(math.inf)))
            for i in usable:
                edge = self.edges[i]
                result[i] = away[edge.src] + 1 <= away[edge.dst] + slack
            return result
        if away[chunk.wanted_by] == math.inf:
            raise ModelError(self._no_route(chunk.owner, chunk.wanted_by))
        left = self._distances(chunk.wanted_by, ways_in)
        for i in usable:
            edge = self.edges[i]
            result[i] = away[edge.src] + 1 + left[edge.dst] <= away[chunk.wanted_by] + slack
        return result

    def _image(self, number: int, p: Permutation) -> int:
        chunk = self.chunks[number]
        wanted = -1 if chunk.wanted_by < 0 else p[chunk.wanted_by]
        return self.number[Chunk(p[chunk.owner], wanted, chunk.index)]

    def _find_leaders(self) -> None:
        """Selects a chunk of every orbit as its leader and, for every chunk, a permutation that
        maps the leader to it.
        """
        self.number = {chunk: i for i, chunk in enumerate(self.chunks)}
        self.leader_of: dict[int, tuple[int, Permutation]] = {}
        self.leaders: list[int] = []
        self.stabilisers: dict[int, list[Permutation]] = {}
        for number in range(len(self.chunks)):
            if number in self.leader_of:
                continue
            self.leaders.append(number)
            self.stabilisers[number] = []
            for p in self.elements:
                image = self._image(number, p)
                if image == number and p != self.elements[0]:
                    self.stabilisers[number].append(p)
                self.leader_of.setdefault(image, (number, p))

    def _fill_table(self, detours: dict[int, list[int]]) -> None:
        """Assigns a variable to each pair of a chunk and a link that the chunk may cross. Pairs
        that a symmetry maps to each other have the same variable, so only the leaders' pairs are
        numbered.
        """
        self.table = np.full((len(self.chunks), len(self.edges)), -1, np.int32)
        count = 0
        for number in self.leaders:
            allowed = self._allowed(number, self.slack)
            allowed[detours.get(number, [])] = True
            for i in np.flatnonzero(allowed):
                if self.table[number, i] < 0:
                    images = [self.moved[p][i] for p in self.stabilisers[number]]
                    self.table[number, [i, *images]] = count
                    count += 1
        self.variables = count
        for number, (leader, p) in self.leader_of.items():
            self.table[number, self.moved[p]] = self.table[leader]

    def loads(self) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """Describes the total time of the sends on each link, which is a lower bound on the time of
        a routing. There is an entry for each logical and each physical link: the variables of the
        chunks that may cross the link, how often each variable counts, and the ticks that one chunk
        takes. Equal entries are returned once.
        """
        crossing: dict[tuple[str, str], list[int]] = {}
        for i, edge in enumerate(self.edges):
            for hop in pairwise(edge.route):
                crossing.setdefault(hop, []).append(i)
        capacity = self.graph.topology.capacities()
        groups = [([i], self.cost[i]) for i in range(len(self.edges))]
        for hop, over in crossing.items():
            ns = self.chunk_bytes / float(capacity[hop])
            groups.append((over, max(1, round(ns / self.tick_ns))))
        seen: dict[tuple[bytes, bytes, int], tuple[np.ndarray, np.ndarray, int]] = {}
        for over, cost in groups:
            values = self.table[:, over]
            names, times = np.unique(values[values >= 0], return_counts=True)
            if len(names):
                seen.setdefault((names.tobytes(), times.tobytes(), cost), (names, times, cost))
        return list(seen.values())

    def greedy(self) -> list[bool]:
        """A first solution: for every leader, a tree of shortest paths over the least used
        links.
        """
        used = [False] * self.variables
        load = np.zeros(len(self.edges))
        for number in self.leaders:
            chunk, row = self.chunks[number], self.table[number]
            depth = {chunk.owner: 0}
            parent: dict[int, int] = {}
            queue = deque([chunk.owner])
            while queue:
                rank = queue.popleft()
                for i in sorted(self.out[rank], key=lambda i: (load[i], i)):
                    to = self.edges[i].dst
                    if row[i] < 0 or depth.get(to, math.inf) <= depth[rank]:
                        continue
                    if to not in depth:
                        queue.append(to)
                        depth[to] = depth[rank] + 1
                        parent[to] = i
                    elif load[i] < load[parent[to]]:
                        parent[to] = i
            targets = [r for r in depth if r != chunk.owner]
            if chunk.wanted_by >= 0:
                targets, rank = [], chunk.wanted_by
                while rank != chunk.owner:
                    targets.append(rank)
                    rank = self.edges[parent[rank]].src
            for rank in targets:
                load[parent[rank]] += self.cost[parent[rank]]
                used[row[parent[rank]]] = True
        return used
