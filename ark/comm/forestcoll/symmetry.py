"""Finds permutations of ranks that leave a network as it is; the packing draws alike trees at once.

Ranks of boxes, rails, grids and cubes are numbered so that shifts of digits of the rank number are
symmetries. Such groups are proposed, largest first, and tested on the capacities; nothing is
assumed. No element but the identity leaves any rank in place, so all orbits have the group's size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ark.comm.forestcoll.cuts import Ints

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
    for shape, moving in _candidates(ranks):
        generators = [_shift(shape, axis) for axis in moving]
        if all(_keeps(generator, matrix, demand) for generator in generators):
            yield Group(_elements(shape, moving))
    yield trivial(ranks)


Shape = tuple[int, ...]


def _candidates(ranks: int) -> list[tuple[Shape, tuple[int, ...]]]:
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


def _shift(shape: Shape, axis: int) -> Ints:
    ranks = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    if axis >= 0:
        return np.roll(ranks, 1, axis).reshape(-1)
    turn = ranks.T.reshape(-1)  # the first rank of every box, then the second of every box, ...
    image = np.empty_like(turn)
    image[turn] = np.roll(turn, 1)
    return image


def _keeps(image: Ints, matrix: Ints, demand: Ints) -> bool:
    return bool((demand[image] == demand).all() and (matrix[np.ix_(image, image)] == matrix).all())


def _elements(shape: Shape, moving: tuple[int, ...]) -> Ints:
    elements = np.arange(math.prod(shape), dtype=np.int64)[None]
    for axis in moving:
        generator = _shift(shape, axis)
        powers = [elements]
        for _ in range(1, _size(shape, (axis,))):
            powers.append(generator[powers[-1]])
        elements = np.concatenate(powers)
    return elements
