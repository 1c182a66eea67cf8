"""Thousands of ranks through symmetry, against the direct solution where that is quick enough."""

import itertools
from dataclasses import replace

import pytest

from ark.comm.forestcoll import Forest, forest, optimal
from ark.comm.forestcoll.forest import check
from ark.comm.forestcoll.isomorphic import draw
from ark.comm.forestcoll.network import network
from ark.comm.forestcoll.symmetry import find_symmetry
from ark.comm.scale import forest_by_symmetry, optimal_by_symmetry
from ark.comm.topology import Link, Topology, named
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


def _fat_tree(pods, leaves, ranks, aggregates=2, cores=2):
    """Returns three tiers: half of what enters a leaf leaves it, and a half of that its pod."""
    count = pods * leaves * ranks
    links = []

    def wire(a, b, bandwidth):
        links.extend((Link(a, b, bandwidth), Link(b, a, bandwidth)))

    for rank in range(count):
        wire(f"g{rank}", f"leaf{rank // ranks}", 8)
    for leaf in range(pods * leaves):
        for each in range(aggregates):
            wire(f"leaf{leaf}", f"agg{leaf // leaves}.{each}", 4 * ranks // aggregates)
    for pod, each, core in itertools.product(range(pods), range(aggregates), range(cores)):
        wire(f"agg{pod}.{each}", f"core{each}.{core}", 2 * ranks * leaves // aggregates // cores)
    switches = list(dict.fromkeys(end for link in links for end in (link.src, link.dst)))
    rank_ids = tuple(f"g{rank}" for rank in range(count))
    return Topology(
        "fat", rank_ids, tuple(s for s in switches if not s.startswith("g")), tuple(links)
    )


def _without(topology, src, dst):
    """Returns the network with a dead link, both ways."""
    alive = tuple(link for link in topology.links if {link.src, link.dst} != {src, dst})
    assert len(alive) == len(topology.links) - 2
    return replace(topology, links=alive)


@pytest.mark.parametrize(
    ("topology", "height"),
    [
        (_fat_tree(4, 4, 4), 3),
        (_without(_fat_tree(4, 4, 4), "leaf3", "agg0.1"), 3),
        (_without(named("torus6x6"), "g0", "g1"), 6),
        (named("torus4x4x4"), 6),
        (named("hypercube6"), 6),
    ],
    ids=["fat tree", "fat tree, dead link", "torus, dead link", "torus", "cube"],
)
def test_trees_are_drawn_without_packing(topology, height):
    net, best = network(topology), optimal(topology)
    base = draw(net, find_symmetry(net), best.scale, best.k)
    assert base is not None
    made = forest(topology)
    assert made.height == height == max(tree.height for tree in base)
    verify(topology, made)


def test_trees_that_intertwine_are_refused():
    with pytest.raises(UnsupportedError, match="too intertwined"):
        forest_by_symmetry(named("dgx1v"))
