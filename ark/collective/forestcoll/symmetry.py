"""Finds permutations of ranks, or of all nodes, that leave a network unchanged.

In networks of boxes, rails, grids and cubes, a rank number can be written with several digits, for
example (box, place). Incrementing one digit of all rank numbers cyclically (a shift) is then a
symmetry. Groups of such shifts are proposed, the largest first, and each group is tested on the
capacity of every link. In these groups only the identity maps a rank to itself, so all orbits of
ranks (sets of images) have as many ranks as the group has elements. `groups_of` returns groups of
permutations of ranks, with which packing draws isomorphic trees.
`ark.collective.forestcoll.isomorphic` needs permutations of all nodes, to map the trees of one root
to the other roots.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from ark.collective.forestcoll.cuts import Ints
from ark.collective.forestcoll.network import Network
from ark.collective.groups import Group, generated

_MOST_DIGITS = 4


def groups_of(matrix: Ints, demand: Ints) -> Iterator[Group]:
    """Yields groups that leave `matrix` and `demand` unchanged, from large ones to the trivial
    one.
    """
    ranks = len(demand)
    for shape, moving in candidates(ranks):
        generators = [shift(shape, axis) for axis in moving]
        if all(_keeps(generator, matrix, demand) for generator in generators):
            yield _group(ranks, generators)
    yield _group(ranks, [])


Shape = tuple[int, ...]


def candidates(ranks: int) -> list[tuple[Shape, tuple[int, ...]]]:
    """Returns candidates for symmetry groups, as (shape, axes). The shape is a way to write rank
    numbers with several digits, for example 8 ranks as (box, place) with shape (2, 4). The axes are
    the digits whose shifts generate the group; axis -1 stands for a shift of all ranks by one.
    """
    shapes = [shape for shape in _factorings(ranks, _MOST_DIGITS) if shape]
    if ranks & (ranks - 1) == 0:
        shapes.append((2,) * (ranks.bit_length() - 1))
    systems: list[tuple[Shape, tuple[int, ...]]] = []
    for shape in dict.fromkeys(shapes):
        if len(shape) == 2:
            systems.append((shape, (-1,)))
        for count in range(1, len(shape) + 1):
            systems += [
                (shape, moving) for moving in itertools.combinations(range(len(shape)), count)
            ]
    return sorted(systems, key=lambda each: -_size(*each))


def _size(shape: Shape, moving: tuple[int, ...]) -> int:
    return math.prod(shape) if moving == (-1,) else math.prod(shape[axis] for axis in moving)


def _factorings(number: int, most: int) -> Iterator[Shape]:
    """Yields the ways to write a number as an ordered product of at most `most` factors above 1."""
    if number == 1:
        yield ()
    elif most:
        for first in range(2, number + 1):
            if number % first == 0:
                for rest in _factorings(number // first, most - 1):
                    yield (first, *rest)


def shift(shape: Shape, axis: int) -> Ints:
    """Returns the permutation of ranks that increments one digit of each rank's number; the largest
    digit becomes zero. With axis -1 and two digits, all ranks are shifted by one in the order in
    which the first digit varies fastest.
    """
    ranks = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    if axis >= 0:
        return np.roll(ranks, 1, axis).reshape(-1)
    # The order lists the first rank of every box, then the second rank of every box, and so on.
    order = ranks.T.reshape(-1)
    image: Ints = np.empty_like(order)
    image[order] = np.roll(order, 1)
    return image


def _keeps(image: Ints, matrix: Ints, demand: Ints) -> bool:
    return bool((demand[image] == demand).all() and (matrix[np.ix_(image, image)] == matrix).all())


def _group(points: int, generators: Sequence[Ints], ranks: int | None = None) -> Group:
    group = generated(points, generators, ranks)
    assert group is not None
    return group


def find_symmetry(net: Network) -> Group:
    """Returns the largest group of shifts of rank numbers that can be extended to all nodes and
    links.

    The points of the group are the nodes. Only the identity leaves a rank in place.
    """
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
            return _group(len(net.topology.nodes), generators, net.ranks)
    return unmoved(net)


def unmoved(net: Network) -> Group:
    """Returns the trivial group, whose only element, the identity, leaves all nodes in place."""
    return _group(len(net.topology.nodes), [])


def _extend(image: Ints, capacities: dict[tuple[int, int], Fraction], net: Network) -> Ints | None:
    """Extends a permutation of ranks, `image`, to all nodes. Returns None if the links do not allow
    it.

    A switch is identified by its links to nodes that are already mapped. Isomorphic switches keep
    their order, so that a shift that is the identity on all ranks is the identity on all switches.
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
