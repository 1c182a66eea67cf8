"""Packs spanning trees into a network of ranks: the third step of ForestColl, shallow trees first.

Edmonds (1973): if every cut keeps its demand, the trees exist. The papers' algorithm (Berczi and
Frank 2010) adds one edge after another, each with a maximum flow that says how many trees may take
it. Here a whole tree is drawn at once, breadth first, past a pool of the cuts known so far; one check
then accepts it or adds the cuts that it broke to the pool, and it is drawn again. Every accepted
state keeps every cut, so the packing never has to go back. `ark.comm.forestcoll.forest` calls it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ark.comm.forestcoll.cuts import Ints, Mask, Violation, violated_in
from ark.errors import InternalError


@dataclass(frozen=True)
class Branching:
    """A spanning tree of rank numbers: its edges, parents before children, and how many like it."""

    root: int
    edges: tuple[tuple[int, int], ...]
    count: int


def pack(matrix: Ints, demand: Ints) -> list[Branching]:
    """Returns trees, demand[v] of them rooted at v, that use matrix[x, y] units of (x, y) at most.

    Every cut must be enough for `demand`. Roots take turns, so that none is left with the worst.
    """
    residual, pending = matrix.copy(), demand.copy()
    pool = _Pool(residual, pending)
    trees: list[Branching] = []
    while pending.any():
        root = int(pending.argmax())
        tree = _grow(residual, pending, pool, root)
        trees.append(tree)
        residual, pending = _without(residual, pending, tree)
        pool.charge(tree)
    return trees


def _without(residual: Ints, pending: Ints, tree: Branching) -> tuple[Ints, Ints]:
    residual, pending = residual.copy(), pending.copy()
    parents, children = np.array(tree.edges).T
    residual[parents, children] -= tree.count
    pending[tree.root] -= tree.count
    return residual, pending


def _grow(residual: Ints, pending: Ints, pool: _Pool, root: int) -> Branching:
    """Returns a tree that leaves every cut enough for what is then still pending."""
    count = int(pending[root])
    while True:
        drawing = _Drawing(residual, pending, pool, root, count)
        drawing.complete()
        if drawing.spans:
            tree = Branching(root, tuple(drawing.edges), count)
            rest, still_pending = _without(residual, pending, tree)
            broken = violated_in(rest, still_pending) if still_pending.any() else []
            if not broken:
                return tree
        else:
            fewer = drawing.largest_count()
            if fewer:
                count = fewer
                continue
            broken = drawing.broken_cuts()
            if not broken:
                raise InternalError("a tree that keeps every cut cannot be completed.")
        pool.add(broken, residual, pending)


class _Pool:
    """The cuts met so far, each with its slack: capacity leaving it less demand inside it."""

    def __init__(self, residual: Ints, pending: Ints) -> None:
        self.inside: Mask = np.eye(len(pending), dtype=bool)
        self.slack: Ints = residual.sum(axis=1) - pending

    def add(self, broken: list[Violation], residual: Ints, pending: Ints) -> None:
        """Adds the sides of broken cuts; `residual` and `pending` are those before the tree."""
        sides = np.array([violation.side for violation in broken])
        leaving = [int(residual[np.ix_(side, ~side)].sum()) for side in sides]
        self.inside = np.concatenate([self.inside, sides])
        self.slack = np.concatenate([self.slack, np.array(leaving) - sides @ pending])

    def charge(self, tree: Branching) -> None:
        """Takes an accepted tree's use off the slack of every cut."""
        parents, children = np.array(tree.edges).T
        crossings = (self.inside[:, parents] & ~self.inside[:, children]).sum(axis=1)
        self.slack = self.slack - tree.count * (crossings - self.inside[:, tree.root])


class _Drawing:
    """A tree being drawn: `count` copies of it at once, from its root towards all ranks.

    A cut that holds the root may be left once by each copy, since a copy that has left it demands no
    more there; every further crossing costs slack. `crossings` counts those.
    """

    def __init__(self, residual: Ints, pending: Ints, pool: _Pool, root: int, count: int) -> None:
        self.residual, self.pending, self.pool = residual, pending, pool
        self.root, self.count = root, count
        self.edges: list[tuple[int, int]] = []
        self.depth = np.full(len(pending), -1, dtype=np.int64)
        self.depth[root] = 0
        self.left: Mask = ~pool.inside[:, root]
        self.crossings: Ints = np.zeros(len(pool.slack), dtype=np.int64)
        self.open: Mask = residual >= count
        self._closed: Mask = np.zeros(len(pool.slack), dtype=bool)
        self._close()

    @property
    def spans(self) -> bool:
        """Tells whether every rank is reached."""
        return len(self.edges) + 1 == len(self.pending)

    def complete(self) -> None:
        """Adds edges until all ranks are reached or no edge is open."""
        spare = self.residual - self.pending[:, None]
        level = 0
        while not self.spans:
            rows = np.nonzero(self.depth == level)[0]
            if not len(rows):
                return
            columns = np.nonzero(self.depth < 0)[0]
            block = np.ix_(rows, columns)
            choices = np.where(self.open[block], spare[block], np.iinfo(np.int64).min)
            best = int(choices.argmax())
            x, y = rows[best // len(columns)], columns[best % len(columns)]
            if not self.open[x, y]:
                level += 1
                continue
            self._add(int(x), int(y), level)

    def largest_count(self) -> int:
        """Returns the most copies for which some edge would be open; 0 where there is none."""
        reached = self.depth >= 0
        limit = np.where(reached[:, None] & ~reached[None, :], self.residual, 0)
        allowed = self.pool.slack // (self.crossings + 1)
        for cut in np.nonzero(self.left & (allowed < self.count))[0]:
            side = self.pool.inside[cut]
            block = np.ix_(side, ~side)
            limit[block] = np.minimum(limit[block], allowed[cut])
        return int(limit.max())

    def broken_cuts(self) -> list[Violation]:
        """Returns the cuts that the unfinished drawing breaks."""
        residual, pending = self.residual.copy(), self.pending.copy()
        pending[self.root] -= self.count
        for x, y in self.edges:
            residual[x, y] -= self.count
        reached = np.nonzero(self.depth >= 0)[0]
        return violated_in(residual, pending, group=(self.count, reached.tolist()))

    def _add(self, x: int, y: int, level: int) -> None:
        inside = self.pool.inside
        self.crossings += inside[:, x] & ~inside[:, y] & self.left
        self.left |= ~inside[:, y]
        self.edges.append((x, y))
        self.depth[y] = level + 1
        self._close()

    def _close(self) -> None:
        """Closes the edges out of cuts that have no slack for `count` more crossings."""
        full = self.left & ~self._closed
        full &= self.pool.slack < self.count * (self.crossings + 1)
        for cut in np.nonzero(full)[0]:
            side = self.pool.inside[cut]
            self.open[np.ix_(side, ~side)] = False
        self._closed |= full
