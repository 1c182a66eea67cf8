"""Draws the trees of one root so that the trees of all other roots are their images under a
symmetry.

In networks of equal boxes this gives the shallowest trees without a maximum flow. A link's load
over all images follows from the drawn trees' use of the link's orbit, so only uses are counted. It
can fail if trees would have to share links in turn; then the trees are packed one by one.
`ark.collective.forestcoll.forest` tries it first, and needs it for a thousand ranks. If a switch
multicasts, paths of one sender that part at the switch use the links before it once.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from ark.collective.forestcoll.network import Network
from ark.collective.forestcoll.tree import Edge, Tree
from ark.collective.groups import Group
from ark.collective.topology import Topology

_Way = tuple[int, ...]  # node numbers from a rank through switches to a rank


def draw(
    net: Network, symmetry: Group, scale: Fraction, k: int, reversed_too: bool = False
) -> tuple[Tree, ...] | None:
    """Returns k trees per unit of demand, counting copies, for each orbit's least rank; or None.

    Together with all their images, they load no link with more than scale times its bandwidth. Each
    tree is taken in as many copies as fit; if the other trees then do not fit, in one copy. Without
    switches, paths with the most remaining capacity go first. With `reversed_too` the reversed
    trees, along which an all-reduce sums, also fit, over the reverse links.
    """
    boxes = net.topology.equal_boxes() or _neighbours(net)
    grow = _grow if net.topology.switches else _grow_evenly
    for copies in (True, False):
        budget = _Budget(net, symmetry, scale, reversed_too)
        trees: list[Tree] = []
        for root in map(int, np.unique(symmetry.least[: net.ranks])):
            missing = k * int(net.demand[root])
            while missing:
                budget.begin()
                ways = grow(net, budget, boxes, root)
                if ways is None:
                    break
                count = 1 + (budget.take_copies(missing - 1) if copies else 0)
                trees.append(_tree(net.topology, root, ways, count))
                missing -= count
            if missing:
                break
        else:
            return tuple(trees)
    return None


def _neighbours(net: Network) -> list[list[int]]:
    """Returns the ranks in groups that are attached to the same nodes, such as those below one leaf
    switch.
    """
    sends: list[list[int]] = [[] for _ in range(net.ranks)]
    for tail, head in zip(map(int, net.tails), map(int, net.heads), strict=True):
        if tail < net.ranks:
            sends[tail].append(head)
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, heads in enumerate(sends):
        groups[tuple(sorted(heads))].append(rank)
    return list(groups.values())


def _tree(topology: Topology, root: int, ways: list[_Way], count: int) -> Tree:
    edges = []
    for way in ways:
        names = tuple(topology.nodes[node] for node in way)
        edges.append(Edge(way[0], way[-1], ((names, count),)))
    return Tree(root, count, tuple(edges))


class _Budget:
    """For each orbit of links, how often the drawn trees may still use a link of it.

    A link's load, over the images of all drawn trees, is the number of uses of its orbit times the
    size of the group, divided by the size of the orbit.
    """

    def __init__(self, net: Network, symmetry: Group, scale: Fraction, reversed_too: bool) -> None:
        able = net.topology.multicast, net.topology.reduces
        number = {node: index for index, node in enumerate(net.topology.nodes)}
        self._able = [
            frozenset(number[node] for node in nodes) for nodes in able[: 1 + reversed_too]
        ]
        pairs = list(zip(map(int, net.tails), map(int, net.heads), strict=True))
        capacity = dict(zip(pairs, net.bandwidth, strict=True))
        self._orbit: dict[tuple[int, int], int] = {}
        self._left: list[int] = []
        for pair in pairs:
            if pair in self._orbit:
                continue
            orbit = {pair}
            for generator in symmetry.generators:
                for start in list(orbit):
                    moved = (int(generator[start[0]]), int(generator[start[1]]))
                    while moved != start:
                        orbit.add(moved)
                        moved = (int(generator[moved[0]]), int(generator[moved[1]]))
            for each in orbit:
                self._orbit[each] = len(self._left)
            self._left.append(math.floor(scale * capacity[pair] * len(orbit) / symmetry.size))
        self.onward: dict[int, list[int]] = defaultdict(list)
        for tail, head in pairs:
            self.onward[tail].append(head)

    def open(self, tail: int, head: int) -> bool:
        """True if a link may be used once more."""
        return self._left[self._orbit[tail, head]] > 0

    def left(self, way: _Way) -> int:
        """Returns the number of remaining uses of a path: the least of its links."""
        return min(self._left[self._orbit[link]] for link in itertools.pairwise(way))

    def begin(self) -> None:
        """Starts a tree. Its paths share links with each other, but not with earlier trees."""
        self._taken: set[_Way] = set()  # the beginnings of its paths
        self._used: Counter[int] = Counter()

    def take(self, way: _Way) -> bool:
        """Uses the links of a path. Returns False, and uses none, if one of them has no use
        left.
        """
        uses = Counter(self._orbit[link] for link in self._links(way))
        if any(self._left[orbit] < count for orbit, count in uses.items()):
            return False
        for orbit, count in uses.items():
            self._left[orbit] -= count
        self._used += uses
        self._taken.update(way[:length] for length in range(1, len(way) + 1))
        return True

    def take_copies(self, most: int) -> int:
        """Uses all links of the tree again, as often as possible, but at most `most` times."""
        copies = min([most, *(self._left[orbit] // n for orbit, n in self._used.items())])
        for orbit, count in self._used.items():
            self._left[orbit] -= count * copies
        return copies

    def _links(self, way: _Way) -> Iterator[tuple[int, int]]:
        """Yields the links that the tree uses once more, and those of the reversed tree."""
        shared = max((n for n in range(1, len(way)) if way[:n] in self._taken), default=1)
        for reverse, able in enumerate(self._able):
            begin = shared - 1 if way[shared - 1] in able else 0
            for tail, head in itertools.pairwise(way[begin:]):
                yield (head, tail) if reverse else (tail, head)


def _grow(net: Network, budget: _Budget, boxes: list[list[int]], root: int) -> list[_Way] | None:
    """Returns a tree's edges, drawn breadth first; each box is entered once if possible."""
    box = {rank: number for number, group in enumerate(boxes) for rank in group}
    reached, entered = {root}, {box[root]}
    ways: list[_Way] = []
    for once in (True, False):
        queue = deque([root, *(way[-1] for way in ways)])
        while queue and len(reached) < net.ranks:
            rank = queue.popleft()
            for way in _ways(budget, net.ranks, rank):
                end = way[-1]
                new_box = box[end] not in entered
                if end in reached or (once and not new_box and box[end] != box[rank]):
                    continue
                if budget.take(way):
                    reached.add(end)
                    entered.add(box[end])
                    queue.append(end)
                    ways.append(way)
    return ways if len(reached) == net.ranks else None


def _grow_evenly(
    net: Network, budget: _Budget, boxes: list[list[int]], root: int
) -> list[_Way] | None:
    """Returns a tree's edges, drawn level by level over paths of the most remaining capacity."""
    reached = {root}
    level = [root]
    ways: list[_Way] = []
    while level and len(reached) < net.ranks:
        candidates = [way for rank in level for way in _ways(budget, net.ranks, rank)]
        level = []
        for way in sorted(candidates, key=budget.left, reverse=True):
            if way[-1] not in reached and budget.take(way):
                reached.add(way[-1])
                level.append(way[-1])
                ways.append(way)
    return ways if len(reached) == net.ranks else None


def _ways(budget: _Budget, ranks: int, rank: int) -> Iterator[_Way]:
    """Yields paths over open links from a rank through switches to ranks, short ones first."""
    queue: deque[_Way] = deque([(rank,)])
    seen = {rank}
    while queue:
        path = queue.popleft()
        for head in budget.onward[path[-1]]:
            if head in seen or not budget.open(path[-1], head):
                continue
            if head < ranks:
                yield (*path, head)
            else:
                seen.add(head)
                queue.append((*path, head))
