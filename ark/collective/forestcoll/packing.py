"""Packs spanning trees into a network of ranks, shallow trees first: the third step of ForestColl.

Edmonds (1973): if every cut has the capacity for its demand, the trees exist. The papers' algorithm
(Berczi and Frank 2010) adds one edge after another, each with a maximum flow that gives the number
of trees that may take it. Here a whole tree is drawn at once, breadth first, and only a pool of
known cuts is considered (`ark.collective.forestcoll.drawing`). Then maximum flows check all cuts.
If the tree violates some, they are added to the pool, and the tree is drawn again; otherwise the
tree is accepted. In every accepted state no cut is violated, so packing never backtracks. If the
network has symmetries, a tree is drawn together with its images, so equivalent roots get equal
trees. Trees that cannot be packed in this way are packed under a smaller symmetry group, and
finally without symmetry. `ark.collective.forestcoll.forest` calls `pack`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from ark.collective.forestcoll.cuts import Ints, violated_in
from ark.collective.forestcoll.drawing import Drawing, Pool
from ark.collective.forestcoll.symmetry import groups_of
from ark.collective.groups import Group
from ark.errors import InternalError

_MAX_REPACKINGS = 16
_MOST_RANKS_REPACKED = 64


@dataclass(frozen=True)
class Branching:
    """A spanning tree of rank numbers. It has edges (parents precede children) and a number of
    copies.
    """

    root: int
    edges: tuple[tuple[int, int], ...]
    count: int

    @property
    def height(self) -> int:
        """Returns the number of edges from the root to the rank farthest from it."""
        depth = {self.root: 0}
        for parent, child in self.edges:
            depth[child] = depth[parent] + 1
        return max(depth.values())


Family = list[Branching]  # a tree and its images


def packed_trees(matrix: Ints, demand: Ints) -> list[Branching]:
    """Returns trees, of which demand[v] are rooted at v. They use at most matrix[x, y] units of the
    pair (x, y).

    The caller guarantees that every cut has the capacity for `demand`. After a first packing, the
    tallest trees and a random part of the other trees are removed and packed again, a fixed number
    of times. The packing with the lowest trees is returned.
    """
    families = _packed_families(matrix, demand, np.zeros_like(matrix))
    least = _eccentricity(matrix, demand)
    for attempt in range(_MAX_REPACKINGS if len(demand) <= _MOST_RANKS_REPACKED else 0):
        height, _ = best = _heights(families)
        if height == least:
            break
        random = np.random.default_rng(attempt)
        out = [each[0].height == height or random.random() < 0.6 for each in families]
        kept = [each for each, removed in zip(families, out, strict=True) if not removed]
        residual, pending = matrix.copy(), demand.copy()
        for tree in itertools.chain(*kept):
            pending[tree.root] -= tree.count
            for edge in tree.edges:
                residual[edge] -= tree.count
        taste = random.integers(0, 2, matrix.shape)
        repacked = kept + _packed_families(residual, pending, taste)
        if _heights(repacked) < best:
            families = repacked
    return list(itertools.chain(*families))


def _heights(families: list[Family]) -> tuple[int, int]:
    """A measure of a packing to minimise: the greatest height of a tree, then the sum of the
    heights of all trees with their copies.
    """
    heights = [(each[0].height, each[0].count * len(each)) for each in families]
    return max(heights)[0], sum(height * count for height, count in heights)


def _eccentricity(matrix: Ints, demand: Ints) -> int:
    """Returns a lower bound on the height of the tallest tree."""
    farthest = 0
    for root in np.nonzero(demand)[0]:
        reached = np.arange(len(demand)) == root
        steps = 0
        while not reached.all():
            reached = reached | (matrix[reached] > 0).any(axis=0)
            steps += 1
        farthest = max(farthest, steps)
    return farthest


def _packed_families(matrix: Ints, demand: Ints, taste: Ints) -> list[Family]:
    """Returns spanning trees with their images under the network's symmetries; demand[v] of them
    are rooted at rank v. The next tree is always rooted at the rank with the most missing trees.
    Otherwise some root would get only trees that are packed late, which are tall.

    taste: a random number for each edge, added to its spare capacity when edges are chosen, so that
    repeated calls find different trees.
    """
    residual, pending = matrix.copy(), demand.copy()
    families: list[Family] = []
    for group in groups_of(matrix, demand):
        pool = Pool(residual, pending, group)
        while pending.any():
            tree = _grow(residual, pending, pool, int(pending.argmax()), taste)
            if tree is None:
                break
            families.append(_images(tree, group))
            residual, pending = _without(residual, pending, tree, group)
            pool.charge(tree.root, tree.edges, tree.count)
        if not pending.any():
            return families
    raise InternalError("no tree can be completed without violating a cut of the network.")


def _images(tree: Branching, group: Group) -> Family:
    return [
        Branching(
            int(image[tree.root]),
            tuple((int(image[x]), int(image[y])) for x, y in tree.edges),
            tree.count,
        )
        for image in group.images
    ]


def _without(residual: Ints, pending: Ints, tree: Branching, group: Group) -> tuple[Ints, Ints]:
    """Returns the capacities and demands that remain after the tree and its images are subtracted.
    Negative values mean that the tree does not fit.
    """
    residual, pending = residual.copy(), pending.copy()
    for x, y in tree.edges:
        residual[group.images[:, x], group.images[:, y]] -= tree.count
    pending[group.images[:, tree.root]] -= tree.count
    return residual, pending


def _grow(residual: Ints, pending: Ints, pool: Pool, root: int, taste: Ints) -> Branching | None:
    """Draws one spanning tree rooted at `root`, and returns it with the number of its copies, or
    None if there is no such tree.

    The tree's images are its copies under the symmetries of the network (`pool.group`). After the
    tree and its images are subtracted from `residual`, every cut still has the capacity for the
    demands that remain. The number of copies is as large as capacities and cuts allow. Without
    symmetries (a group of one element) there always is such a tree (Berczi and Frank 2010).
    `taste`: see _packed_families.
    """
    while True:
        drawing = Drawing(residual, pending, pool, root, taste)
        drawing.complete()
        if not drawing.spans:
            broken = drawing.broken_cuts()
            if not broken:
                return None
            pool.add(broken, residual, pending)
            continue
        count = min(int(pending[root]), drawing.most_copies())
        while count:
            tree = Branching(root, tuple(drawing.edges), count)
            rest, pending_after = _without(residual, pending, tree, pool.group)
            broken = (
                violated_in(rest, pending_after, orbits=pool.orbits) if pending_after.any() else []
            )
            if not broken:
                return tree
            pool.add(broken, residual, pending)
            count = min(count, pool.most_copies(tree.root, tree.edges))
