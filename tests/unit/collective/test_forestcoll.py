"""ForestColl compared with published optima and brute force over all cuts; its programs are
checked.
"""

from fractions import Fraction

import pytest

from ark.collective.forestcoll import COLLECTIVES, forest, lower, optimal
from ark.collective.programs import check
from ark.collective.topology import named
from tests.slow import examples, slow
from tests.unit.collective.networks import brute_force, random_eulerian, verify

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


LARGE = ("mi300xx2", "mi250x2")  # by their number of trees


@pytest.mark.parametrize("name, inv_x, k", KNOWN)
def test_known_optima(name, inv_x, k):
    best = optimal(named(name))
    assert (best.inv_x, best.k) == (Fraction(inv_x), k)
    assert best.exact


def test_full_mesh_of_8_reaches_512_gb_a_second():
    assert optimal(named("mi300x")).algbw == 512


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[slow] * (n in LARGE)) for n, _, _ in KNOWN]
)
def test_trees_of_known_topologies(name):
    topology = named(name)
    result = forest(topology)
    verify(topology, result)


@pytest.mark.parametrize("block", range(examples(10)))
def test_random_eulerian_networks_against_all_cuts(block):
    for seed in range(block * 50, block * 50 + 50):
        topology = random_eulerian(seed)
        result = forest(topology)
        assert result.optimum.inv_x == brute_force(topology), seed
        side = result.optimum.cut
        leaving = sum(
            each
            for (src, dst), each in topology.capacities().items()
            if src in side and dst not in side
        )
        assert Fraction(len(set(side) & set(topology.ranks))) / leaving == result.optimum.inv_x
        verify(topology, result)


def test_random_networks_have_worst_cuts_of_all_sizes():
    best = [optimal(random_eulerian(seed)) for seed in range(500)]
    ranks = [sum(node in random_eulerian(s).ranks for node in b.cut) for s, b in enumerate(best)]
    assert sum(inside < b.roots - 1 for inside, b in zip(ranks, best, strict=True)) > 80


@pytest.mark.parametrize("seed", range(examples(60)))
def test_random_networks_run_every_collective(seed):
    topology = random_eulerian(1000 + seed)
    root = topology.ranks[seed % len(topology.ranks)]
    for collective in COLLECTIVES:
        rooted = collective in ("broadcast", "reduce")
        program = lower(forest(topology, collective, root=root if rooted else None))
        check(program)
    best = optimal(topology, roots={root: 1})
    assert best.inv_x == brute_force(topology, {root: 1})
