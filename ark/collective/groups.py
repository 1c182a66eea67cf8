"""Finite groups of permutations that leave ranks, nodes or a search problem unchanged.

ForestColl draws and packs trees together with their images under such a group, and TACCL shares
variables between chunks that are images of each other. Each of them finds generators in its own
way.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """A group of permutations: `images[h, point]` is the image of a point under element h.

    Element 0 is the identity. `generators` are the images under elements that generate the group.
    """

    images: Ints
    generators: tuple[Ints, ...] = ()

    @property
    def size(self) -> int:
        """Returns the number of elements."""
        return len(self.images)

    @property
    def least(self) -> Ints:
        """Returns, for every point, the lowest point of its orbit."""
        return np.asarray(self.images.min(axis=0))

    def orbits(self) -> list[list[int]]:
        """Returns the orbits, which are sets of points that the group maps to each other, sorted by
        their lowest points.
        """
        return [sorted(set(map(int, orbit))) for orbit in np.unique(np.sort(self.images.T), axis=0)]


def generated(
    points: int, generators: Sequence[Ints], telling: int | None = None, most: int | None = None
) -> Group | None:
    """Returns the group of permutations of 0 .. points - 1 that the generators generate; None if it
    has more than `most` elements.

    telling: elements are distinguished by their images of the first `telling` points; by default of
    all points. Powers of the first generator come first, then their products with powers of the
    next one, and so on.
    """
    elements = [np.arange(points, dtype=np.int64)]
    known = {elements[0][:telling].tobytes()}
    rounds = itertools.cycle(generators)
    unchanged = 0
    while unchanged < len(generators):
        generator, size = next(rounds), len(elements)
        waiting = list(elements)
        while waiting:
            waiting = [generator[element] for element in waiting]
            waiting = [each for each in waiting if each[:telling].tobytes() not in known]
            known.update(each[:telling].tobytes() for each in waiting)
            elements += waiting
            if most is not None and len(elements) > most:
                return None
        unchanged = unchanged + 1 if len(elements) == size else 0
    return Group(np.array(elements), tuple(generators))
