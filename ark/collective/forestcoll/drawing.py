"""Draws one tree, together with its images under a symmetry group, so that no known cut is
violated.

`ark.collective.forestcoll.packing` calls it. If a cut contains the tree's root, the cut's demand
has one unit for the tree, so the tree may cross the cut once without using its slack. Every further
crossing, and every crossing of a cut without the root, uses one unit of slack. The images of a tree
cross a cut as often as the tree crosses the images of the cut, so cuts are stored as orbits.
"""

from __future__ import annotations

import numpy as np

from ark.collective.forestcoll.cuts import Ints, Mask, Violation, violated_in
from ark.collective.groups import Group

Edges = tuple[tuple[int, int], ...]
_UNBOUNDED_CAPACITY = 1 << 62


class Pool:
    """Orbits of known cuts with their slack. The slack of a cut is the capacity that leaves it
    minus the demand inside.

    `inside[o, h, rank]` is true if a rank is in image h of cut o.
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
        """Adds the node sets of violated cuts. `residual` and `pending` are the capacities and
        demands without the tree that is being drawn.
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
        """Returns how many copies of a spanning tree and its images fit in the slack of all
        cuts.
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
    """A tree, with its images, that is being drawn from its root towards all ranks.

    `rest` is the remaining capacity, `open` the edges that may still be used. Edges from ranks
    nearest to the root come first. Among these, the edge with the most spare capacity is used.
    An edge's spare capacity is the capacity that the sender does not need for its own trees, plus
    the edge's number in `taste` (see ark.collective.forestcoll.packing).
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
        """Returns how many copies of the complete drawing fit in all capacities and cuts."""
        used = self.residual - self.rest
        by_capacity = int((self.residual[used > 0] // used[used > 0]).min())
        return min(by_capacity, self.pool.most_copies(self.root, tuple(self.edges)))

    def broken_cuts(self) -> list[Violation]:
        """Returns the cuts that are violated if the unfinished drawing is accepted."""
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
        """Removes from `open` the changed edges whose use would exceed the slack of a cut."""
        most = self.crossings + self.left.sum(axis=1)
        for cut in np.nonzero(changed & (self.pool.slack < most))[0]:
            inside = self.pool.inside[cut].astype(np.float32)
            leaving = inside * self.left[cut][:, None]
            crossed = (leaving.T @ (1 - inside)).astype(np.int64)
            self.open &= (crossed == 0) | (self.crossings[cut] + crossed <= self.pool.slack[cut])
