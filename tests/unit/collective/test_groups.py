"""Groups of permutations checked by their definition: closed, without duplicates, and the orbits
partition the points.
"""

import numpy as np
import pytest

from ark.collective.groups import generated

combinatorics = pytest.importorskip("sympy.combinatorics")


@pytest.mark.parametrize("seed", range(60))
def test_generated_groups_are_those_of_sympy(seed):
    random = np.random.default_rng(seed)
    points = int(random.integers(1, 7))
    generators = [random.permutation(points) for _ in range(int(random.integers(0, 4)))]
    group = generated(points, generators)
    theirs = [combinatorics.Permutation(list(map(int, image))) for image in generators]
    other = combinatorics.PermutationGroup(theirs or [combinatorics.Permutation(points - 1)])
    assert group.size == other.order()
    images = {tuple(map(int, image)) for image in group.images}
    assert len(images) == group.size and tuple(group.images[0]) == tuple(range(points))
    assert images == {tuple(each(i) for i in range(points)) for each in other.elements}
    orbits = sorted(map(tuple, group.orbits()))
    moved = {tuple(sorted(orbit)) for orbit in other.orbits()}
    assert set(orbits) >= moved and sorted(p for o in orbits for p in o) == list(range(points))
    assert [min(o) for p in range(points) for o in orbits if p in o] == list(group.least)
    assert generated(points, generators, most=group.size) is not None
    assert generated(points, generators, most=group.size - 1) is None or group.size == 1
