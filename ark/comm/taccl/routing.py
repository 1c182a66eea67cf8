"""Stage 1 of TACCL: which chunk crosses which logical link, as a CP-SAT model.

Bandwidth is relaxed: the order on a link is not decided here, only the sum over a link and over
every physical link that routes share (a switch port is one). Chunks that a symmetry maps to each
other share their variables. Shah et al. (NSDI 2023), section 5.1.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ark.comm.packages import require
from ark.comm.taccl.logical import Edge, Logical, Permutation, symmetries
from ark.errors import ModelError, PlanError, UnsupportedError

_WIDE_MODEL = 6000  # variables up to which chunks may stray one link from their shortest paths
_MOST_PAIRS = 60_000_000  # of chunk and logical link: a quarter of a gigabyte of table


@dataclass(frozen=True)
class Chunk:
    """A chunk `index` of what rank `owner` starts with, and the rank that wants it, or -1: all."""

    owner: int
    wanted_by: int
    index: int


@dataclass(frozen=True)
class Routing:
    """What stage 1 returns: for each chunk the logical links it crosses, parents first.

    `time_us` is the model's relaxed time, `bound_us` the least that the solver could not rule out,
    `gap` = 1 - bound/time; `optimal` says that the gap is closed.
    """

    chunks: tuple[Chunk, ...]
    links: tuple[tuple[int, ...], ...]
    time_us: float
    bound_us: float
    optimal: bool

    @property
    def gap(self) -> float:
        """How far the time may be from the least possible, 0 to 1."""
        return 1 - self.bound_us / self.time_us if self.time_us else 0.0


def chunks_of(graph: Logical, all_to_all: bool) -> tuple[Chunk, ...]:
    """The chunks of an all-gather, or of an all-to-all without those that stay."""
    parts = range(graph.sketch.input_chunkup)
    ranks = range(graph.ranks)
    if all_to_all:
        return tuple(Chunk(s, d, j) for s in ranks for d in ranks if s != d for j in parts)
    return tuple(Chunk(s, -1, j) for s in ranks for j in parts)


def route(graph: Logical, all_to_all: bool, chunk_bytes: float, time_limit_s: float) -> Routing:
    """Routes every chunk; a search that runs out of time returns the best found with its gap.

    Raises ModelError if the sketch forbids every route of some demand, UnsupportedError if chunks
    and links are too many to write down.
    """
    chunks = graph.sketch.input_chunkup * graph.ranks * (graph.ranks if all_to_all else 1)
    if chunks * len(graph.edges) > _MOST_PAIRS:
        raise UnsupportedError(
            f"{chunks} chunks over {len(graph.edges)} connections of {graph.topology.name} are "
            "more than TACCL's model takes; use fewer of either, or another algorithm."
        )
    model = _Model(graph, chunks_of(graph, all_to_all), chunk_bytes)
    return model.solve(time_limit_s)


class _Model:
    """The variables are numbered; `table[chunk, edge]` is the number, or -1 for a barred pair."""

    def __init__(self, graph: Logical, chunks: tuple[Chunk, ...], chunk_bytes: float) -> None:
        self.graph, self.chunks = graph, chunks
        self.edges = graph.edges
        self.into: list[list[int]] = [[] for _ in range(graph.ranks)]
        self.out: list[list[int]] = [[] for _ in range(graph.ranks)]
        for i, edge in enumerate(self.edges):
            self.into[edge.dst].append(i)
            self.out[edge.src].append(i)
        self.beta_ns = [max(1, round(chunk_bytes / e.gbps)) for e in self.edges]
        self.cost_ns = [
            b + round(e.alpha_us * 1e3) for b, e in zip(self.beta_ns, self.edges, strict=True)
        ]
        self.chunk_bytes = chunk_bytes
        self.hops = [self._distances(rank, self.out) for rank in range(graph.ranks)]
        self.back = [self._distances(rank, self.into) for rank in range(graph.ranks)]
        self._demand_routes()
        self.elements = symmetries(graph)
        self.find_leaders()
        slack = 1
        if sum(self._allowed(c, slack).sum() for c in self.leaders) > _WIDE_MODEL:
            slack = 0
        self.fill_table(slack)

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

    def _permitted(self, chunk: Chunk, edge: Edge) -> bool:
        size = self.graph.per_box
        if edge.dst == chunk.owner or edge.src == chunk.wanted_by:
            return False
        if edge.sender is None or edge.src // size != chunk.owner // size:
            return True
        return self.graph.sketch.leaves_through(chunk.owner % size, edge.sender)

    def _allowed(self, number: int, slack: int) -> np.ndarray:
        """Which links a chunk may cross: permitted ones on paths at most `slack` too long."""
        chunk = self.chunks[number]
        usable = [i for i, e in enumerate(self.edges) if self._permitted(chunk, e)]
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

    def find_leaders(self) -> None:
        """Picks one chunk of every orbit and, for every chunk, a permutation from its leader."""
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

    def fill_table(self, slack: int) -> None:
        """Numbers the variables: leaders' own first, then every other chunk's by symmetry."""
        pair = {(e.src, e.dst): i for i, e in enumerate(self.edges)}
        moved: dict[Permutation, np.ndarray] = {}
        for p in self.elements:
            moved[p] = np.array([pair[p[e.src], p[e.dst]] for e in self.edges], int)
        self.table = np.full((len(self.chunks), len(self.edges)), -1, np.int32)
        count = 0
        for number in self.leaders:
            for i in np.flatnonzero(self._allowed(number, slack)):
                if self.table[number, i] < 0:
                    images = [moved[p][i] for p in self.stabilisers[number]]
                    self.table[number, [i, *images]] = count
                    count += 1
        self.variables = count
        for number, (leader, p) in self.leader_of.items():
            self.table[number, moved[p]] = self.table[leader]

    def loads(self) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """Sums that bound the time: (variables, how often each, ns each), one a distinct link."""
        crossing: dict[tuple[str, str], list[int]] = {}
        for i, edge in enumerate(self.edges):
            for hop in pairwise(edge.route):
                crossing.setdefault(hop, []).append(i)
        capacity = self.graph.topology.capacities()
        groups = [([i], self.cost_ns[i]) for i in range(len(self.edges))]
        for hop, over in crossing.items():
            groups.append((over, max(1, round(self.chunk_bytes / float(capacity[hop])))))
        seen: dict[tuple[bytes, bytes, int], tuple[np.ndarray, np.ndarray, int]] = {}
        for over, cost in groups:
            values = self.table[:, over]
            names, times = np.unique(values[values >= 0], return_counts=True)
            if len(names):
                seen.setdefault((names.tobytes(), times.tobytes(), cost), (names, times, cost))
        return list(seen.values())

    def greedy(self) -> list[bool]:
        """A first solution: for every leader a shortest-path tree over the least used links."""
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
                load[parent[rank]] += self.cost_ns[parent[rank]]
                used[row[parent[rank]]] = True
        return used

    def solve(self, time_limit_s: float) -> Routing:
        """Builds and solves the CP-SAT model."""
        cp_model = require("ortools.sat.python.cp_model")
        model = cp_model.CpModel()
        sent = [model.new_bool_var(f"s{i}") for i in range(self.variables)]
        first = self.greedy()
        most = max(self.cost_ns) * len(self.chunks) * max(4, len(self.edges))
        total = model.new_int_var(0, most, "total")
        for names, times, cost in self.loads():
            weights = [int(t) * cost for t in times]
            model.add(cp_model.LinearExpr.weighted_sum([sent[v] for v in names], weights) <= total)
        for number in self.leaders:
            self._arrivals(model, sent, number, total, most)
        for variable, value in zip(sent, first, strict=True):
            model.add_hint(variable, value)
        model.minimize(total)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = max(time_limit_s, 0.01)
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 1
        solver.parameters.linearization_level = 2
        status = solver.solve(model)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            chosen = [bool(solver.value(v)) for v in sent]
            bound, optimal = solver.best_objective_bound, status == cp_model.OPTIMAL
            better = self._connections(cp_model, model, sent, total, solver, chosen)
            return self._result(better or chosen, bound, optimal)
        if any(self.stabilisers.values()):
            raise PlanError(
                f"No routes were found in {time_limit_s:g} s under the sketch's symmetries; give "
                "more time or fewer symmetries."
            )
        return self._result(first, max(solver.best_objective_bound, 0), False)

    def _connections(
        self, cp_model: Any, model: Any, sent: list, total: Any, solver: Any, chosen: list[bool]
    ) -> list[bool] | None:
        """uc-min or uc-max: among the best routings the one with fewest (most) connections."""
        left = solver.parameters.max_time_in_seconds - solver.wall_time
        if not self.graph.sketch.hyperedges or left <= 0:
            return None
        model.add(total <= round(solver.objective_value))
        marks, signs = [], []
        for i, edge in enumerate(self.edges):
            names = {int(v) for v in self.table[:, i] if v >= 0}
            sign = self._wish(edge)
            if sign and names:
                mark = model.new_bool_var(f"c{i}")
                model.add_max_equality(mark, [sent[v] for v in sorted(names)])
                marks.append(mark)
                signs.append(sign)
        model.clear_hints()
        for variable, value in zip(sent, chosen, strict=True):
            model.add_hint(variable, value)
        model.minimize(cp_model.LinearExpr.weighted_sum(marks, signs))
        solver.parameters.max_time_in_seconds = min(left, max(0.5, solver.wall_time))
        if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return [bool(solver.value(v)) for v in sent]

    def _wish(self, edge: Edge) -> int:
        """1 or -1 where the sketch wants few or many connections of the link's switch, else 0."""
        sketch, size = self.graph.sketch, self.graph.per_box
        if edge.sender is None:
            for row, wish in zip(sketch.switches, sketch.hyperedges, strict=True):
                if edge.src % size in row and edge.dst % size in row:
                    return 1 if wish == "uc-min" else -1
        return 0

    def _arrivals(self, model: Any, sent: list, number: int, total: Any, most: int) -> None:
        """A leader arrives once where it is wanted, after it was where it came from."""
        chunk, row = self.chunks[number], self.table[number]
        reach = {chunk.owner} | {self.edges[i].dst for i in np.flatnonzero(row >= 0)}
        at = {
            rank: model.new_int_var(0, 0 if rank == chunk.owner else most, f"t{number}.{rank}")
            for rank in sorted(reach)
        }
        for rank in sorted(reach):
            ways = [sent[row[i]] for i in self.into[rank] if row[i] >= 0]
            wanted = chunk.wanted_by in (-1, rank) and rank != chunk.owner
            if wanted:
                model.add_exactly_one(ways)
                model.add(at[rank] <= total)
            elif rank != chunk.owner:
                model.add_at_most_one(ways)
            for i in self.out[rank]:
                if row[i] < 0:
                    continue
                send, to = sent[row[i]], self.edges[i].dst
                model.add(at[to] >= at[rank] + self.cost_ns[i]).only_enforce_if(send)
                if rank != chunk.owner and not wanted:
                    model.add_bool_or([*ways, send.negated()])
        self._entries(model, sent, chunk, row)

    def _entries(self, model: Any, sent: list, chunk: Chunk, row: np.ndarray) -> None:
        """Says what the rest implies, for the solver's bound: a chunk enters every box it must."""
        size = self.graph.per_box
        for box in range(self.graph.sketch.nnodes):
            if box == chunk.owner // size or chunk.wanted_by // size not in (-1, box):
                continue
            doors = [
                sent[row[i]]
                for i, e in enumerate(self.edges)
                if row[i] >= 0 and e.dst // size == box and e.src // size != box
            ]
            model.add(sum(doors) >= 1)

    def _result(self, chosen: list[bool], bound: float, optimal: bool) -> Routing:
        picked = np.array([*chosen, False])
        links = []
        latest = 0
        for number, chunk in enumerate(self.chunks):
            mine = {self.edges[i].dst: int(i) for i in np.flatnonzero(picked[self.table[number]])}
            at = {chunk.owner: 0}
            order: list[int] = []
            waiting = sorted(mine)
            while waiting:
                ready = [r for r in waiting if self.edges[mine[r]].src in at]
                if not ready:
                    break
                for rank in ready:
                    at[rank] = at[self.edges[mine[rank]].src] + self.cost_ns[mine[rank]]
                    order.append(mine[rank])
                waiting = [r for r in waiting if r not in at]
            if chunk.wanted_by >= 0:
                order = self._path(chunk, mine)
                latest = max(latest, at[chunk.wanted_by])
            else:
                latest = max(latest, *at.values())
            links.append(tuple(order))
        loads = [
            int(sum(int(t) for v, t in zip(names, times, strict=True) if chosen[v])) * cost
            for names, times, cost in self.loads()
        ]
        time = max([latest, *loads])
        return Routing(self.chunks, tuple(links), time / 1e3, min(bound, time) / 1e3, optimal)

    def _path(self, chunk: Chunk, mine: dict[int, int]) -> list[int]:
        path = []
        rank = chunk.wanted_by
        while rank != chunk.owner:
            path.append(mine[rank])
            rank = self.edges[mine[rank]].src
        return path[::-1]
