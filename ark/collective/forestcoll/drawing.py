"""Draws one tree, together with its images under a symmetry group, so that no known cut is
violated.

`ark.collective.forestcoll.packing` calls it. A cut separates a node set S, inside, from all other
nodes. Its slack is the capacity of the links that leave S minus the number of trees that must leave
S, which is one for each missing tree that is rooted in S. A tree rooted in S may therefore cross
the cut once without using slack. Every further crossing uses one unit of slack, and so does every
crossing of a cut that does not contain the root. A symmetry maps a tree and a cut to images that
cross each other equally often, so cuts are stored as orbits (sets of images).
"""

from __future__ import annotations

import numpy as np

from ark.collective.forestcoll.cuts import Ints, Mask, Violation, violated_in
from ark.collective.groups import Group

Edges = tuple[tuple[int, int], ...]
_UNBOUNDED_CAPACITY = 1 << 62


class Pool:
    """The known cuts, stored as orbits under the symmetry group, with their slack. The slack of a
    cut is the capacity that leaves its node set minus the number of trees still to be rooted inside
    the set. `inside[o, h, rank]` is True if the rank is in image h of cut o.
    """

    def __init__(self, residual: Ints, pending: Ints, group: Group) -> None:
        self.group = group
        self.orbits = group.orbits()
        ranks = len(pending)
        self.inside: Mask = np.zeros((0, group.size, ranks), dtype=bool)
        self.slack: Ints = np.zeros(0, dtype=np.int64)
        singles = [np.arange(ranks) == orbit[0] for orbit in self.orbits]
        self.add([Violation(0, side) for side in singles], residual, pending)

    def add(self, broken: list[Violation], residual: Ints, pending: Ints) -> None:
        """Adds the node sets of violated cuts to the pool. `residual` and `pending` are the
        remaining capacities and the numbers of missing trees, before the tree that is being drawn
        is subtracted.
        """
        sides = np.array([violation.side for violation in broken])
        leaving = [int(residual[np.ix_(side, ~side)].sum()) for side in sides]
        self.inside = np.concatenate([self.inside, sides[:, self.group.images]])
        self.slack = np.concatenate([self.slack, np.array(leaving) - sides @ pending])

    def charge(self, root: int, edges: Edges, count: int) -> None:
        """Subtracts the crossings of an accepted tree and its images from the slack of every
        cut.
        """
        self.slack = self.slack - count * self._crossings(root, edges)

    def most_copies(self, root: int, edges: Edges) -> int:
        """Returns how many copies of a spanning tree and its images the slack of all known cuts
        allows.
        """
        crossings = self._crossings(root, edges)
        return int(
            (self.slack[crossings > 0] // crossings[crossings > 0]).min(initial=_UNBOUNDED_CAPACITY)
        )

    def _crossings(self, root: int, edges: Edges) -> Ints:
        parents, children = np.array(edges).T
        crossed = (self.inside[:, :, parents] & ~self.inside[:, :, children]).sum(axis=(1, 2))
        crossings: Ints = crossed - self.inside[:, :, root].sum(axis=1)
        return crossings


class Drawing:
    """A tree that is being drawn edge by edge, from its root towards all ranks, together with its
    images under the symmetry group.

    `rest` is the remaining capacity of each edge. `open` marks the edges that may still be used.
    The next edge starts at the rank nearest to the root that has open edges. Among the edges with
    this property, the one with the most spare capacity is used. An edge's spare capacity is its
    remaining capacity minus the number of trees still to be rooted at its sender, plus `taste`, a
    random number for each edge (ark.collective.forestcoll.packing).
    """

    def __init__(self, residual: Ints, pending: Ints, pool: Pool, root: int, taste: Ints) -> None:
        self.residual, self.pending, self.pool, self.root = residual, pending, pool, root
        self.taste = taste
        self.edges: list[tuple[int, int]] = []
        self.rest = residual.copy()
        self.depth = np.full(len(pending), -1, dtype=np.int64)
        self.depth[root] = 0
        self.left: Mask = ~pool.inside[:, :, root]
        self.crossings: Ints = np.zeros(len(pool.slack), dtype=np.int64)
        self.open: Mask = residual > 0
        self._close(np.ones(len(pool.slack), dtype=bool))

    @property
    def spans(self) -> bool:
        """True if every rank is reached."""
        return len(self.edges) + 1 == len(self.pending)

    def complete(self) -> None:
        """Adds edges until all ranks are reached or no edge may be used."""
        level = 0
        while not self.spans:
            rows = np.nonzero(self.depth == level)[0]
            if not len(rows):
                return
            columns = np.nonzero(self.depth < 0)[0]
            block = np.ix_(rows, columns)
            spare = self.rest[block] - self.pending[rows, None] + self.taste[block]
            choices = np.where(self.open[block], spare, np.iinfo(np.int64).min)
            best = int(choices.argmax())
            x, y = int(rows[best // len(columns)]), int(columns[best % len(columns)])
            if self.open[x, y]:
                self._add(x, y, level)
            else:
                level += 1

    def most_copies(self) -> int:
        """Returns how many copies of the completed tree and its images fit in all capacities and
        known cuts.
        """
        used = self.residual - self.rest
        by_capacity = int((self.residual[used > 0] // used[used > 0]).min())
        return min(by_capacity, self.pool.most_copies(self.root, tuple(self.edges)))

    def broken_cuts(self) -> list[Violation]:
        """Returns the cuts that would be violated if the unfinished tree and its images were
        accepted.
        """
        images = self.pool.group.images
        pending = self.pending.copy()
        pending[images[:, self.root]] -= 1
        reached = np.nonzero(self.depth >= 0)[0]
        teams = [(1, image[reached].tolist()) for image in images]
        return violated_in(self.rest, pending, teams, orbits=self.pool.orbits)

    def _add(self, x: int, y: int, level: int) -> None:
        inside, images = self.pool.inside, self.pool.group.images
        crossed = inside[:, :, x] & ~inside[:, :, y] & self.left
        leaves = ~inside[:, :, y] & ~self.left
        self.crossings += crossed.sum(axis=1)
        self.left |= leaves
        self.edges.append((x, y))
        self.depth[y] = level + 1
        self.rest[images[:, x], images[:, y]] -= 1
        if self.rest[x, y] == 0:
            self.open[images[:, x], images[:, y]] = False
        self._close(np.any(crossed | leaves, axis=1))

    def _close(self, changed: Mask) -> None:
        """Removes edges from `open` that would exceed the slack of a cut if they were used.
        changed: the cuts whose crossings have changed.
        """
        most = self.crossings + self.left.sum(axis=1)
        for cut in np.nonzero(changed & (self.pool.slack < most))[0]:
            inside = self.pool.inside[cut].astype(np.float32)
            leaving = inside * self.left[cut][:, None]
            crossed = (leaving.T @ (1 - inside)).astype(np.int64)
            self.open &= (crossed == 0) | (self.crossings[cut] + crossed <= self.pool.slack[cut])
