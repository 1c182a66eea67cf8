"""ForestColl against the published optima, brute force over all cuts, and the program checker."""

import itertools
import random
from fractions import Fraction

import pytest

from ark.comm.forestcoll import COLLECTIVES, forest, lower, optimal
from ark.comm.program import check
from ark.comm.topology import Link, Topology, named

KNOWN = [
    ("star4:bandwidth=450", "1/150", 1),
    ("ring8", "7/2", 2),
    ("hypercube3", "7/3", 3),
    ("dgx1v:link=1", "7/6", 6),
    ("mi300x", "1/64", 1),
    ("a100x2", "3/65", 13),
    ("a100x8", "7/25", 1),
    ("a100x16", "3/5", 1),
    ("h100x2", "3/100", 2),
    ("h100x4", "31/500", 10),
    ("mi300xx2", "5/166", 83),
    ("mi250x2", "15/166", 83),
]


@pytest.mark.parametrize("name, inv_x, k", KNOWN)
def test_known_optima(name, inv_x, k):
    best = optimal(named(name))
    assert (best.inv_x, best.k) == (Fraction(inv_x), k)
    assert best.exact


def test_full_mesh_of_8_reaches_512_gb_a_second():
    assert optimal(named("mi300x")).algbw == 512


@pytest.mark.parametrize("name", [name for name, _, _ in KNOWN])
def test_trees_of_known_topologies(name):
    topology = named(name)
    made = forest(topology)
    verify(topology, made)


def verify(topology, made):
    """Checks a gathering forest from its definition, apart from the checks that it makes itself."""
    ranks = topology.ranks
    capacity = topology.capacities()
    load = dict.fromkeys(capacity, 0)
    copies = dict.fromkeys(range(len(ranks)), 0)
    for tree in made.gathering:
        parent = {edge.dst: edge.src for edge in tree.edges}
        assert len(parent) == len(tree.edges) == len(ranks) - 1
        assert tree.root not in parent
        for rank in parent:
            seen = set()
            while rank != tree.root:
                assert rank not in seen
                seen.add(rank)
                rank = parent[rank]
        copies[tree.root] += tree.count
        for edge in tree.edges:
            assert sum(units for _, units in edge.paths) == tree.count
            for path, units in edge.paths:
                assert (path[0], path[-1]) == (ranks[edge.src], ranks[edge.dst])
                assert all(node in topology.switches for node in path[1:-1])
                for link in itertools.pairwise(path):
                    load[link] += units
    optimum = made.optimum
    assert set(copies.values()) == {optimum.k}
    assert all(load[link] <= optimum.scale * capacity[link] for link in capacity)
    assert optimum.inv_x == optimum.scale / optimum.k


def random_eulerian(seed):
    """Returns a topology of 2 to 8 nodes, up to 3 of them switches, made of random cycles."""
    rng = random.Random(seed)
    count = rng.randint(2, 8)
    switches = rng.randint(0, min(3, count - 2))
    nodes = [f"n{index}" for index in range(count)]
    every = rng.sample(nodes, count)
    cycles = [every] + [
        rng.sample(nodes, rng.randint(2, count)) for _ in range(rng.randint(0, 2 * count))
    ]
    total = {}
    for cycle in cycles:
        units = Fraction(rng.randint(1, 6), rng.choice([1, 1, 1, 2, 3]))
        for src, dst in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            total[src, dst] = total.get((src, dst), 0) + units
    links = tuple(Link(*pair, bandwidth, 0.5) for pair, bandwidth in sorted(total.items()))
    return Topology(
        f"random {seed}", tuple(nodes[: count - switches]), tuple(nodes[count - switches :]), links
    )


def brute_force(topology, weight=None):
    """Returns 1/x* as the largest ratio over all cuts."""
    capacity = topology.capacities()
    best = Fraction(0)
    for size in range(1, len(topology.nodes)):
        for side in itertools.combinations(topology.nodes, size):
            if not set(topology.ranks) <= set(side):
                inside = sum(
                    (weight or {}).get(node, not weight) for node in side if node in topology.ranks
                )
                leaving = sum(
                    each for (src, dst), each in capacity.items() if src in side and dst not in side
                )
                best = max(best, Fraction(inside) / leaving)
    return best


@pytest.mark.parametrize("block", range(10))
def test_random_eulerian_networks_against_all_cuts(block):
    for seed in range(block * 50, block * 50 + 50):
        topology = random_eulerian(seed)
        made = forest(topology)
        assert made.optimum.inv_x == brute_force(topology), seed
        side = made.optimum.cut
        leaving = sum(
            each
            for (src, dst), each in topology.capacities().items()
            if src in side and dst not in side
        )
        assert Fraction(len(set(side) & set(topology.ranks))) / leaving == made.optimum.inv_x
        verify(topology, made)


@pytest.mark.parametrize("seed", range(0, 60))
def test_random_networks_run_every_collective(seed):
    topology = random_eulerian(1000 + seed)
    root = topology.ranks[seed % len(topology.ranks)]
    for collective in COLLECTIVES:
        rooted = collective in ("broadcast", "reduce")
        program = lower(forest(topology, collective, root=root if rooted else None))
        check(program)
    best = optimal(topology, roots={root: 1})
    assert best.inv_x == brute_force(topology, {root: 1})
