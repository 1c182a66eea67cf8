"""Finds permutations of ranks, and of all nodes, that leave a network as it is.

Ranks of boxes, rails, grids and cubes are numbered so that shifts of digits of the rank number are
symmetries. Such groups are proposed, largest first, and tested on every capacity; nothing is
assumed. No element but the identity leaves any rank in place, so all orbits of ranks have the
group's size. The packing draws isomorphic trees at once with a `Group`;
`ark.comm.forestcoll.isomorphic` expands one root's trees to all with a `Symmetry`.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ark.comm.forestcoll.cuts import Ints
from ark.comm.forestcoll.network import Network

_MOST_DIGITS = 4


@dataclass(frozen=True)
class Group:
    """`images[h, rank]` is where element h moves a rank; element 0 moves nothing."""

    images: Ints

    @property
    def size(self) -> int:
        """Returns the number of elements."""
        return len(self.images)

    def orbits(self) -> list[list[int]]:
        """Returns the sets of ranks that are moved into each other, least rank first."""
        return [sorted(map(int, orbit)) for orbit in np.unique(np.sort(self.images.T), axis=0)]


def trivial(ranks: int) -> Group:
    """Returns the group that moves nothing."""
    return Group(np.arange(ranks, dtype=np.int64)[None])


def groups_of(matrix: Ints, demand: Ints) -> Iterator[Group]:
    """Yields groups that keep `matrix` and `demand`, large ones first and the trivial one last."""
    ranks = len(demand)
    for shape, moving in candidates(ranks):
        generators = [shift(shape, axis) for axis in moving]
        if all(_keeps(generator, matrix, demand) for generator in generators):
            yield Group(_elements(shape, moving))
    yield trivial(ranks)


Shape = tuple[int, ...]


def candidates(ranks: int) -> list[tuple[Shape, tuple[int, ...]]]:
    """Returns digit systems and the digits that move; axis -1 means one shift of all in turn."""
    shapes = [shape for shape in _factorings(ranks, _MOST_DIGITS) if shape]
    if ranks & (ranks - 1) == 0:
        shapes.append((2,) * (ranks.bit_length() - 1))
    found: list[tuple[Shape, tuple[int, ...]]] = []
    for shape in dict.fromkeys(shapes):
        if len(shape) == 2:
            found.append((shape, (-1,)))
        for count in range(1, len(shape) + 1):
            found += [
                (shape, moving) for moving in itertools.combinations(range(len(shape)), count)
            ]
    return sorted(found, key=lambda each: -_size(*each))


def _size(shape: Shape, moving: tuple[int, ...]) -> int:
    return math.prod(shape) if moving == (-1,) else math.prod(shape[axis] for axis in moving)


def _factorings(number: int, most: int) -> Iterator[Shape]:
    """Yields the ways to write a number as an ordered product of factors above 1."""
    if number == 1:
        yield ()
    elif most:
        for first in range(2, number + 1):
            if number % first == 0:
                for rest in _factorings(number // first, most - 1):
                    yield (first, *rest)


def shift(shape: Shape, axis: int) -> Ints:
    """Returns where each rank goes when a digit of its number goes up by one, the last to zero.

    With axis -1, and two digits, all ranks turn by one in the order of the second digit first.
    """
    ranks = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    if axis >= 0:
        return np.roll(ranks, 1, axis).reshape(-1)
    order = ranks.T.reshape(-1)  # the first rank of every box, then the second of every box, ...
    image = np.empty_like(order)
    image[order] = np.roll(order, 1)
    return image


def _keeps(image: Ints, matrix: Ints, demand: Ints) -> bool:
    return bool((demand[image] == demand).all() and (matrix[np.ix_(image, image)] == matrix).all())


def _elements(shape: Shape, moving: tuple[int, ...]) -> Ints:
    elements = np.arange(math.prod(shape), dtype=np.int64)[None]
    for axis in moving:
        generator = shift(shape, axis)
        powers = [elements]
        for _ in range(1, _size(shape, (axis,))):
            powers.append(generator[powers[-1]])
        elements = np.concatenate(powers)
    return elements


@dataclass(frozen=True)
class Symmetry:
    """A group of node permutations of a topology that leaves no rank in place but by identity.

    `generators` are images of node numbers; element (p, q, ...) applies generator 0 p times and so
    on, `orders` are the numbers of different powers. `element_of[rank]` moves the orbit's least
    rank, `representative[rank]`, to the rank.
    """

    nodes: int
    generators: tuple[Ints, ...]
    orders: tuple[int, ...]
    representative: Ints
    element_of: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.orders)

    def image(self, element: tuple[int, ...]) -> Ints:
        """Returns where the element moves every node."""
        moved = np.arange(self.nodes)
        for generator, power in zip(self.generators, element, strict=True):
            for _ in range(power):
                moved = generator[moved]
        return moved

    def elements(self) -> Iterator[Ints]:
        """Yields the images of all elements, the identity first."""
        for element in itertools.product(*map(range, self.orders)):
            yield self.image(element)


def find_symmetry(net: Network) -> Symmetry:
    """Returns the largest group of shifts of rank numbers that extends to all nodes and links."""
    capacities = dict(
        zip(zip(map(int, net.tails), map(int, net.heads), strict=True), net.bandwidth, strict=True)
    )
    extended: dict[tuple[tuple[int, ...], int], Ints | None] = {}
    for shape, moving in candidates(net.ranks):
        generators = []
        for axis in moving:
            if (shape, axis) not in extended:
                extended[shape, axis] = _extend(shift(shape, axis), capacities, net)
            generator = extended[shape, axis]
            if generator is None:
                break
            generators.append(generator)
        else:
            return _symmetry(tuple(generators), net)
    return unmoved(net)


def unmoved(net: Network) -> Symmetry:
    """Returns the group that moves nothing."""
    return _symmetry((), net)


def _symmetry(generators: tuple[Ints, ...], net: Network) -> Symmetry:
    ranks = net.ranks
    orders = []
    for generator in generators:
        moved, order = generator, 1
        while not (moved[:ranks] == np.arange(ranks)).all():
            moved, order = generator[moved], order + 1
        orders.append(order)
    representative = np.full(ranks, -1, dtype=np.int64)
    element_of: list[tuple[int, ...]] = [()] * ranks
    for rank in range(ranks):
        if representative[rank] >= 0:
            continue
        places = {rank: (0,) * len(generators)}
        for axis, generator in enumerate(generators):
            for start, element in list(places.items()):
                place = start
                for power in range(1, orders[axis]):
                    place = int(generator[place])
                    places[place] = (*element[:axis], power, *element[axis + 1 :])
        for place, element in places.items():
            representative[place] = rank
            element_of[place] = element
    nodes = len(net.topology.nodes)
    return Symmetry(nodes, generators, tuple(orders), representative, tuple(element_of))


def _extend(image: Ints, capacities: dict[tuple[int, int], Fraction], net: Network) -> Ints | None:
    """Returns the permutation of all nodes that moves ranks by `image`; None if links forbid it.

    A switch is known by its links to nodes already mapped; isomorphic switches keep their order, so
    that shifts that come back to the start for all ranks do so for all switches.
    """
    nodes = len(net.topology.nodes)
    moved = {rank: int(image[rank]) for rank in range(net.ranks)}
    near: dict[int, list[tuple[int, bool, Fraction]]] = defaultdict(list)
    for (tail, head), bandwidth in capacities.items():
        near[tail].append((head, True, bandwidth))
        near[head].append((tail, False, bandwidth))
    waiting = list(range(net.ranks, nodes))
    while waiting:
        known, reached = set(moved), set(moved.values())
        homes: dict[frozenset[tuple[int, bool, Fraction]], list[int]] = defaultdict(list)
        for node in range(nodes - 1, net.ranks - 1, -1):
            if node not in reached:
                homes[frozenset(each for each in near[node] if each[0] in reached)].append(node)
        left = []
        for node in waiting:
            links = [each for each in near[node] if each[0] in known]
            home = homes[frozenset((moved[other], outward, rate) for other, outward, rate in links)]
            if links and not home:
                return None
            if links:
                moved[node] = home.pop()
            else:
                left.append(node)
        if len(left) == len(waiting):
            return None
        waiting = left
    for (tail, head), bandwidth in capacities.items():
        if capacities.get((moved[tail], moved[head])) != bandwidth:
            return None
    names = net.topology.nodes
    for able in (net.topology.multicast, net.topology.reduces):
        if any((names[moved[node]] in able) != (names[node] in able) for node in range(nodes)):
            return None
    return np.array([moved[node] for node in range(nodes)], dtype=np.int64)
