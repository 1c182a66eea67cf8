"""Thousands of ranks through symmetry, against the direct solution where that is quick enough."""

import itertools

import pytest

from ark.comm.forestcoll import Forest, optimal
from ark.comm.forestcoll.forest import check
from ark.comm.forestcoll.network import network
from ark.comm.scale import forest_by_symmetry, optimal_by_symmetry
from ark.comm.topology import named
from ark.errors import UnsupportedError
from tests.unit.comm.networks import random_eulerian, verify

SMALL = [
    "ring8",
    "dgx1v",
    "dgx2x2",
    "mi250x2",
    "mi300xx4",
    "ndv2x3",
    "h100x16:fabric=rail",
    "a100x4:fabric=leafspine,oversubscription=2",
    "a100x2+h100x2",
    "mesh3x4",
]


@pytest.mark.parametrize("name", SMALL)
def test_the_quotient_has_the_same_optimum(name):
    quotient, direct = optimal_by_symmetry(named(name)), optimal(named(name))
    assert (quotient.inv_x, quotient.k, quotient.scale) == (direct.inv_x, direct.k, direct.scale)


@pytest.mark.parametrize("seed", range(2000, 2040))
def test_the_quotient_of_a_network_without_symmetry(seed):
    topology = random_eulerian(seed)
    assert optimal_by_symmetry(topology).inv_x == optimal(topology).inv_x


@pytest.mark.parametrize("name", ["a100x2", "h100x16:fabric=rail", "mi300xx4", "ndv2x2"])
def test_expanded_trees_pass_the_full_check(name):
    topology = named(name)
    made = forest_by_symmetry(topology)
    everything = tuple(tree for rank in range(len(topology.ranks)) for tree in made.trees(rank))
    net = network(topology)
    check(net, made.optimum.scale, net.demand * made.optimum.k, everything)
    verify(topology, Forest(topology, "all_gather", made.optimum, gathering=everything))


def test_1024_ranks_and_samples_of_their_trees():
    topology = named("h100x128")
    made = forest_by_symmetry(topology)
    assert made.optimum.inv_x == optimal(topology).inv_x
    assert made.height == 2
    for rank in (0, 9, 500, 1023):
        (tree,) = made.trees(rank)
        assert tree.root == rank
        assert {edge.dst for edge in tree.edges} == set(range(1024)) - {rank}
        links = topology.capacities()
        for edge in tree.edges:
            for path, _ in edge.paths:
                assert all(pair in links for pair in itertools.pairwise(path))


def test_trees_that_intertwine_are_refused():
    with pytest.raises(UnsupportedError, match="too intertwined"):
        forest_by_symmetry(named("hypercube3"))
