"""Stage 1 of TACCL: decides which chunk crosses which logical link, by a CP-SAT model.

This stage does not order the sends on a link. It only bounds the total time of the sends on each
logical link, and on every physical link that routes share, such as a switch port. Chunks that a
symmetry maps to each other share their variables. Shah et al. (NSDI 2023), section 5.1.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ark.collective.packages import require
from ark.collective.taccl.choices import Choices, Chunk, chunks_of
from ark.collective.taccl.detours import add_detours
from ark.collective.taccl.logical import Edge, Logical
from ark.errors import PlanError, UnsupportedError

_MOST_PAIRS = 60_000_000  # a table of so many pairs of chunk and link takes 240 MB


@dataclass(frozen=True)
class Routing:
    """The result of stage 1: for each chunk, the logical links that it crosses, in an order in
    which a link comes after the links that lead to it.

    `time_us` is the time of this routing in the model, in which sends on a link are not ordered.
    `bound_us` is the solver's lower bound on the time of any routing. `gap` is 1 - bound/time;
    `optimal` is true if the gap is 0. The bound is valid only for this sketch and for the `paths`
    of the model; other sketches and paths may be faster.
    """

    chunks: tuple[Chunk, ...]
    links: tuple[tuple[int, ...], ...]
    time_us: float
    bound_us: float
    optimal: bool
    paths: str

    @property
    def gap(self) -> float:
        """How much less time a better routing could take at most, as a fraction of this routing's
        time.
        """
        return 1 - self.bound_us / self.time_us if self.time_us else 0.0


def route(graph: Logical, all_to_all: bool, chunk_bytes: float, time_limit_s: float) -> Routing:
    """Finds a route for every chunk. If the time is up, returns the best routing so far, with its
    gap.

    time_limit_s: seconds for building the model and solving it; the solver gets the time that
    building leaves. Raises ModelError if the sketch forbids every route of a demand,
    UnsupportedError if there are too many chunks and links to build a model.
    """
    deadline = time.monotonic() + time_limit_s
    chunks = graph.sketch.input_chunkup * graph.ranks * (graph.ranks if all_to_all else 1)
    if chunks * len(graph.edges) > _MOST_PAIRS:
        raise UnsupportedError(
            f"{chunks} chunks over {len(graph.edges)} connections of {graph.topology.name} exceed "
            "the limit of TACCL's model; use fewer of either, or another algorithm."
        )
    choices = Choices(graph, chunks_of(graph, all_to_all), chunk_bytes)
    return _Model(choices).solve(deadline)


class _Model:
    """The CP-SAT model from whose solution the routing is read."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.graph, self.chunks = choices.graph, choices.chunks
        self.edges, self.cost = choices.edges, choices.cost

    @property
    def table(self) -> np.ndarray:
        """For every chunk and logical link, the number of the variable that states whether the
        chunk crosses the link. Detours add variables.
        """
        return self.choices.table

    def _start(self, deadline: float) -> tuple[list[bool], str]:
        """Returns a first solution, and the name of the paths that the model uses. The solution
        uses shortest paths, or paths around the links that shortest paths would fill.
        """
        paths = f"paths at most {self.choices.slack} longer than the shortest"
        shortest = self.choices.greedy()
        relaxed = self._result(shortest, 0, False, paths).time_us
        longer = add_detours(self.choices, deadline)
        if longer is not None:
            if self._result(longer, 0, False, paths).time_us < relaxed:
                return longer, f"{paths}, and detours past full links"
            self.choices.allow_none()
        return shortest, paths

    def solve(self, deadline: float) -> Routing:
        """Builds and solves the CP-SAT model. Returns the routing."""
        cp_model = require("ortools.sat.python.cp_model")
        model = cp_model.CpModel()
        now = time.monotonic()
        first, paths = self._start(now + (deadline - now) / 4)
        sent = [model.new_bool_var(f"s{i}") for i in range(self.choices.variables)]
        loads = self.choices.loads()
        most = max(int(times.sum()) * cost for _, times, cost in loads)
        most = max(most, max(self.cost) * self.graph.ranks)
        total = model.new_int_var(0, most, "total")
        for names, times, cost in loads:
            weights = [int(t) * cost for t in times]
            model.add(cp_model.LinearExpr.weighted_sum([sent[v] for v in names], weights) <= total)
        for number in self.choices.leaders:
            self._arrivals(model, sent, number, total, most)
        for variable, value in zip(sent, first, strict=True):
            model.add_hint(variable, value)
        model.minimize(total)
        solver = cp_model.CpSolver()
        time_limit_s = max(deadline - time.monotonic(), 0.01)
        solver.parameters.max_time_in_seconds = time_limit_s
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 1
        solver.parameters.linearization_level = 2
        status = solver.solve(model)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            chosen = [bool(solver.value(v)) for v in sent]
            bound, optimal = solver.best_objective_bound, status == cp_model.OPTIMAL
            better = self._connections(cp_model, model, sent, total, solver, chosen)
            return self._result(better or chosen, bound, optimal, paths)
        if any(self.choices.stabilisers.values()):
            raise PlanError(
                f"No routes were found in {time_limit_s:g} s under the sketch's symmetries; give "
                "more time or fewer symmetries."
            )
        return self._result(first, max(solver.best_objective_bound, 0), False, paths)

    def _connections(
        self,
        cp_model: Any,
        model: Any,
        sent: list[Any],
        total: Any,
        solver: Any,
        chosen: list[bool],
    ) -> list[bool] | None:
        """Of the best routings, finds one with the fewest connections (strategy uc-min) or the most
        (uc-max).
        """
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
        """The weight of this logical link in the objective, by the sketch's strategy for the link's
        switch: 1 to use few connections of the switch (uc-min), -1 to use many (uc-max), 0 for no
        preference.
        """
        sketch, size = self.graph.sketch, self.graph.per_box
        if edge.sender is None:
            for row, wish in zip(sketch.switches, sketch.hyperedges, strict=True):
                if edge.src % size in row and edge.dst % size in row:
                    return 1 if wish == "uc-min" else -1
        return 0

    def _arrivals(self, model: Any, sent: list[Any], number: int, total: Any, most: int) -> None:
        """Adds the constraints on the arrivals of chunk `number`: it arrives exactly once at every
        rank that needs it, and only after it has reached the previous rank of its path.
        """
        chunk, row = self.chunks[number], self.table[number]
        reach = {chunk.owner} | {self.edges[i].dst for i in np.flatnonzero(row >= 0)}
        at = {
            rank: model.new_int_var(0, 0 if rank == chunk.owner else most, f"t{number}.{rank}")
            for rank in sorted(reach)
        }
        for rank in sorted(reach):
            ways = [sent[row[i]] for i in self.choices.into[rank] if row[i] >= 0]
            wanted = chunk.wanted_by in (-1, rank) and rank != chunk.owner
            if wanted:
                model.add_exactly_one(ways)
                model.add(at[rank] <= total)
            elif rank != chunk.owner:
                model.add_at_most_one(ways)
            for i in self.choices.out[rank]:
                if row[i] < 0:
                    continue
                send, to = sent[row[i]], self.edges[i].dst
                model.add(at[to] >= at[rank] + self.cost[i]).only_enforce_if(send)
                if rank != chunk.owner and not wanted:
                    model.add_bool_or([*ways, send.negated()])
        self._entries(model, sent, chunk, row)

    def _entries(self, model: Any, sent: list[Any], chunk: Chunk, row: np.ndarray) -> None:
        """Adds an implied constraint, which improves the solver's bound: a chunk must enter every
        box that needs it.
        """
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

    def _result(self, chosen: list[bool], bound: float, optimal: bool, paths: str) -> Routing:
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
                    at[rank] = at[self.edges[mine[rank]].src] + self.cost[mine[rank]]
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
            for names, times, cost in self.choices.loads()
        ]
        time = max([latest, *loads])
        tick_us = self.choices.tick_ns / 1e3
        bound_us = min(bound, time) * tick_us
        return Routing(self.chunks, tuple(links), time * tick_us, bound_us, optimal, paths)

    def _path(self, chunk: Chunk, mine: dict[int, int]) -> list[int]:
        path = []
        rank = chunk.wanted_by
        while rank != chunk.owner:
            path.append(mine[rank])
            rank = self.edges[mine[rank]].src
        return path[::-1]
