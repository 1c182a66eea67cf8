"""Draws the trees of one root. The trees of all other roots are images of these trees under a
symmetry of the network.

In networks of equal boxes this gives the trees of least height without computing maximum flows. The
orbit of a link is the set of its images. The load of a link over all images of the trees follows
from how often the drawn trees use links of its orbit, so only these uses are counted. The method
can fail if trees must take turns in using shared links. Trees are then packed one by one.
`ark.collective.forestcoll.forest` tries this method first; for a thousand ranks it is the only one
that is fast enough. If a switch multicasts, and paths of one sender separate at this switch, they
count only once on their common links to the switch.
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

_Way = tuple[int, ...]  # node numbers of a path from a rank, through switches, to a rank


def draw(
    net: Network, symmetry: Group, scale: Fraction, k: int, reversed_too: bool = False
) -> tuple[Tree, ...] | None:
    """Returns k trees for each unit of demand of a root; a tree counts once for each of its copies.
    Trees are returned only for the lowest rank of each orbit of ranks; the trees of the other ranks
    are images of them. Returns None if no such trees are found.

    Together with all images, the trees load no link with more than `scale` times its bandwidth.
    Each tree gets as many copies as fit. If the other trees then do not fit, each tree gets one
    copy. In networks without switches, paths with the most remaining capacity are used first. With
    `reversed_too`, the reversed trees, along which an all-reduce sums, also fit on the reverse
    links.
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
    """Returns groups of ranks that are attached to the same nodes, for example to one leaf
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
    """For each orbit of links (the images of a link under the symmetry), how often the drawn trees
    may still use a link of the orbit.

    The load of a link, over the images of all drawn trees, is the number of uses of its orbit times
    the number of elements of the group, divided by the number of links in the orbit.
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
        """True if the link may be used at least once more."""
        return self._left[self._orbit[tail, head]] > 0

    def left(self, way: _Way) -> int:
        """Returns how often the path could still be used: the least number of remaining uses of its
        links.
        """
        return min(self._left[self._orbit[link]] for link in itertools.pairwise(way))

    def begin(self) -> None:
        """Starts a new tree. Paths of one tree that share their first links up to a switch that
        multicasts use these links once. Paths of different trees use every link separately.
        """
        self._taken: set[_Way] = set()  # the beginnings of the tree's paths
        self._used: Counter[int] = Counter()

    def take(self, way: _Way) -> bool:
        """Uses the links of a path. Returns False, and uses none, if one of the links may not be
        used any more.
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
        """Adds copies of the current tree, as many as the remaining uses of its links permit, but
        at most `most`. Returns the number of added copies.
        """
        copies = min([most, *(self._left[orbit] // n for orbit, n in self._used.items())])
        for orbit, count in self._used.items():
            self._left[orbit] -= count * copies
        return copies

    def _links(self, way: _Way) -> Iterator[tuple[int, int]]:
        """Yields the links that a path adds to the tree. If an all-reduce also sums along the
        reversed tree, the links that the path adds to that tree follow.
        """
        shared = max((n for n in range(1, len(way)) if way[:n] in self._taken), default=1)
        for reverse, able in enumerate(self._able):
            begin = shared - 1 if way[shared - 1] in able else 0
            for tail, head in itertools.pairwise(way[begin:]):
                yield (head, tail) if reverse else (tail, head)


def _grow(net: Network, budget: _Budget, boxes: list[list[int]], root: int) -> list[_Way] | None:
    """Returns the edges of a tree, drawn breadth first. Each box is entered once if possible. None
    if the tree cannot be completed.
    """
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
    """Returns the edges of a tree, drawn level by level along paths with the most remaining
    capacity. None if the tree cannot be completed.
    """
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
    """Yields paths over links with remaining uses, from a rank through switches to other ranks,
    short paths first.
    """
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
