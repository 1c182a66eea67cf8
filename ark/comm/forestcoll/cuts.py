"""The one question that every step of ForestColl asks: does each cut keep what must leave it?

Ranks hold demands d_v (trees still to be rooted at v); a node set S that lacks some rank is violated
when the capacity leaving S is below the demand inside it. With a source s and arcs s -> v of
capacity d_v this is maxflow(s, v) < sum of d, for some rank v (ForestColl, section 5; Edmonds 1973).
The optimum, switch removal and packing all call `RootedCuts.violated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ark.comm.packages import require
from ark.errors import InternalError, UnsupportedError

_LARGEST = 1 << 62

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Violation:
    """A violated cut: `side[i]` tells whether node i is in S, `deficit` how much capacity lacks."""

    deficit: int
    side: Mask


class RootedCuts:
    """A flow network of `count` nodes whose capacities and demands change, but not its arcs.

    Nodes 0 .. ranks - 1 are the ranks. The solver is OR-tools' push-relabel; its graph is built once
    (docs/collectives.md has the measurement). `group` adds one more demand that may start from any
    of several ranks at once: a tree that is half built.
    """

    def __init__(self, count: int, ranks: int, tails: Ints, heads: Ints) -> None:
        self._count = count
        self._ranks = ranks
        self._source = count
        self._group = count + 1
        self._solver = require("ortools.graph.python.max_flow").SimpleMaxFlow()
        everyone = np.arange(ranks, dtype=np.int64)
        source = np.full(ranks, self._source)
        group = np.full(ranks, self._group)
        arc_tails = np.concatenate([tails, source, group, [self._source]]).astype(np.int64)
        arc_heads = np.concatenate([heads, everyone, everyone, [self._group]]).astype(np.int64)
        self._arcs = self._solver.add_arcs_with_capacity(
            arc_tails, arc_heads, np.zeros(len(arc_tails), dtype=np.int64)
        )
        self._first_source_arc = len(tails)

    def violated(
        self,
        capacity: Ints,
        demand: Ints,
        group: tuple[int, Sequence[int]] = (0, ()),
        first_only: bool = False,
    ) -> list[Violation]:
        """Returns violated cuts, among them one of the largest deficit; none if all cuts hold.

        `capacity` is aligned with the arcs, `demand` with the ranks; `group` is (demand, ranks it
        may start from). With `first_only` the search ends at the first violation.
        """
        total = int(demand.sum()) + group[0]
        endless = int(capacity.sum()) + total + 1
        if endless > _LARGEST // (self._ranks + 2):
            raise UnsupportedError(
                "The bandwidths need more than 64 bits as whole numbers on one scale; "
                "round them to fractions with smaller denominators."
            )
        open_group = np.zeros(self._ranks, dtype=np.int64)
        open_group[list(group[1])] = endless
        solver = self._solver
        solver.set_arcs_capacity(
            self._arcs, np.concatenate([capacity, demand, open_group, [group[0]]])
        )
        found = []
        for rank in range(self._ranks):
            if solver.solve(self._source, rank) != solver.OPTIMAL:
                raise InternalError(f"the maximum-flow solver failed towards node {rank}.")
            flow = solver.optimal_flow()
            if flow < total:
                side = np.zeros(self._count + 2, dtype=bool)
                side[solver.get_source_side_min_cut()] = True
                found.append(Violation(total - flow, side[: self._count]))
                if first_only:
                    break
            # Cuts without this rank are done; what remains has it on the source's side.
            solver.set_arc_capacity(self._first_source_arc + rank, endless)
        return found


def violated_in(
    matrix: Ints,
    demand: Ints,
    group: tuple[int, Sequence[int]] = (0, ()),
    first_only: bool = False,
) -> list[Violation]:
    """Returns `RootedCuts.violated` for a square matrix of capacities, ranks first."""
    tails, heads = np.nonzero(matrix)
    cuts = RootedCuts(len(matrix), len(demand), tails, heads)
    return cuts.violated(matrix[tails, heads], demand, group, first_only)
