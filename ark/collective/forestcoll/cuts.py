"""Tests whether each cut of a network has the capacity for the data that must cross it. Every step
of ForestColl uses this test.

Ranks have demands: d_v is the number of trees still to be rooted at v. A node set S that does not
contain every rank is violated if the capacity leaving S is below the demand inside it. With a
source s and arcs s -> v of capacity d_v, some set is violated if and only if maxflow(s, v) < sum of
d for some rank v (ForestColl, section 5; Edmonds 1973). The optimum, switch removal and packing all
call `RootedCuts.violated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ark.collective.packages import require
from ark.errors import InternalError, UnsupportedError

_MAX_CAPACITY = 1 << 62

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Violation:
    """A violated cut. `side[i]` is true if node i is in the set S; `deficit` is the missing
    capacity.
    """

    deficit: int
    side: Mask


class RootedCuts:
    """A flow network whose arcs are fixed and whose capacities and demands can be changed.

    It has `count` nodes; nodes 0 .. ranks - 1 are the ranks. A team is a set of ranks with one
    common demand, whose flow may start at any rank of the team. A team represents the ranks that an
    unfinished tree has reached. The solver is OR-tools' push-relabel; its graph is built once
    (docs/collectives.md has the measurement).
    """

    def __init__(
        self,
        count: int,
        ranks: int,
        tails: Ints,
        heads: Ints,
        teams: Sequence[Sequence[int]] = (),
    ) -> None:
        self._count = count
        self._ranks = ranks
        self._source = count
        starts = [*range(ranks), *range(count + 1, count + 1 + len(teams))]
        member_tails = [count + 1 + team for team, members in enumerate(teams) for _ in members]
        member_heads = [member for members in teams for member in members]
        self._solver = require("ortools.graph.python.max_flow").SimpleMaxFlow()
        arc_tails = np.concatenate([tails, [self._source] * len(starts), member_tails])
        arc_heads = np.concatenate([heads, starts, member_heads])
        self._arcs = self._solver.add_arcs_with_capacity(
            arc_tails.astype(np.int64),
            arc_heads.astype(np.int64),
            np.zeros(len(arc_tails), dtype=np.int64),
        )
        self._first_source_arc = len(tails)
        self._members = len(member_heads)

    def violated(
        self,
        capacity: Ints,
        demand: Ints,
        first_only: bool = False,
        orbits: Sequence[Sequence[int]] | None = None,
    ) -> list[Violation]:
        """Returns violated cuts, among them the one with the largest deficit; an empty list if no
        cut is violated. The deficit of a cut is its demand minus its capacity.

        `capacity` has an entry for each arc, `demand` for each rank and then for each team. With
        `first_only` the search ends at the first violation. `orbits` are sets of ranks that a
        symmetry of capacities and demands maps to each other; only one rank of each set is tried.
        """
        total = int(demand.sum())
        endless = int(capacity.sum()) + total + 1
        if endless > _MAX_CAPACITY // (self._ranks + self._members + 1):
            raise UnsupportedError(
                "The bandwidths need more than 64 bits as whole numbers on one scale; "
                "round them to fractions with smaller denominators."
            )
        solver = self._solver
        solver.set_arcs_capacity(
            self._arcs, np.concatenate([capacity, demand, np.full(self._members, endless)])
        )
        broken = []
        for orbit in [[rank] for rank in range(self._ranks)] if orbits is None else orbits:
            if solver.solve(self._source, orbit[0]) != solver.OPTIMAL:
                raise InternalError(f"the maximum-flow solver failed towards node {orbit[0]}.")
            flow = solver.optimal_flow()
            if flow < total:
                side = np.zeros(self._source + 1 + len(demand), dtype=bool)
                side[solver.get_source_side_min_cut()] = True
                broken.append(Violation(total - flow, side[: self._count]))
                if first_only:
                    break
            # All cuts whose node set lacks some rank of this orbit have been examined. Arcs of
            # unlimited capacity from the source force these ranks into the node sets of all
            # remaining cuts.
            for rank in orbit:
                solver.set_arc_capacity(self._first_source_arc + rank, endless)
        return broken


def violated_in(
    matrix: Ints,
    demand: Ints,
    teams: Sequence[tuple[int, Sequence[int]]] = (),
    first_only: bool = False,
    orbits: Sequence[Sequence[int]] | None = None,
) -> list[Violation]:
    """Returns `RootedCuts.violated` for a square matrix of capacities, ranks first.

    Teams are given as (demand, ranks); the other arguments are those of `violated`.
    """
    tails, heads = np.nonzero(matrix)
    members = [ranks for _, ranks in teams]
    cuts = RootedCuts(len(matrix), len(demand), tails, heads, members)
    demands = np.concatenate([demand, [count for count, _ in teams]]).astype(np.int64)
    return cuts.violated(matrix[tails, heads], demands, first_only, orbits)
