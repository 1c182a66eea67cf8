"""The optimal all-reduce rate: known values, a comparison with a linear program over all trees, and
a test that no collective program is faster.
"""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from ark.collective.forestcoll import forest, optimal, optimal_all_reduce
from ark.collective.packages import require
from ark.collective.programs import check, execute, reference_result
from ark.collective.simulate import simulate, tune_pieces
from ark.collective.synthesis import algorithms, synthesize
from ark.collective.topology import Link, Topology, named
from tests.slow import examples, slow
from tests.unit.collective.networks import random_eulerian

# By network: the highest rate of an all-reduce in GB/s, and the fraction of it that a
# reduce-scatter followed by an all-gather reaches if all ranks own equal parts. Computed by hand:
# every byte crosses at least 2 (N - 1) links for N ranks, so mesh4x4 (48 links of 1 GB/s) has at
# most 48 / 30.
KNOWN = {
    "mesh4x4": (Fraction(8, 5), Fraction(2, 3)),
    "mesh3x3": (Fraction(24, 16), Fraction(3, 4)),
    "mesh8x8": (Fraction(224, 126), Fraction(4, 7)),
    "ring8": (Fraction(8, 7), 1),
    "torus4x4": (Fraction(64, 30), 1),
    "hypercube4": (Fraction(64, 30), 1),
    "a100x2": (Fraction(520, 3), 1),
    "a100x4": (Fraction(400, 3), 1),
    "dgx1v": (Fraction(600, 7), 1),
    "mi250": (Fraction(1200, 7), 1),
    "h100x4": (Fraction(8000, 31), 1),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_rates_are_exact(name):
    topology = named(name)
    best = optimal_all_reduce(topology)
    rate, share = KNOWN[name]
    assert best.rate == best.bound == rate and best.exact and best.gap == 0
    assert optimal(topology).algbw / 2 == rate * share
    assert best.uniform == (share == 1)


def all_trees(topology):
    """Yields (root, links) of every tree of links from a root to all ranks."""
    pairs = list(topology.capacities())
    count = len(topology.ranks)
    for chosen in itertools.combinations(pairs, count - 1):
        heads = {dst for _, dst in chosen}
        roots = set(topology.ranks) - heads
        if len(heads) == count - 1 and len(roots) == 1:
            (root,) = reached = roots
            reached = {root}
            for _ in range(count):
                reached |= {dst for src, dst in chosen if src in reached}
            if len(reached) == count:
                yield root, chosen


def rate_by_trees(topology):
    """Returns the best rate, by a linear program over the explicit trees of both directions."""
    solver = require("ortools.linear_solver.pywraplp").Solver.CreateSolver("GLOP")
    capacities = topology.capacities()
    rows = {pair: solver.Constraint(0, float(rate)) for pair, rate in capacities.items()}
    balance = {root: solver.Constraint(0, 0) for root in topology.ranks}
    for direction, network in ((1, topology), (-1, topology.reverse())):
        for root, links in all_trees(network):
            amount = solver.NumVar(0, solver.infinity(), "")
            balance[root].SetCoefficient(amount, direction)
            for src, dst in links:
                rows[(src, dst) if direction == 1 else (dst, src)].SetCoefficient(amount, 1)
            if direction == 1:
                solver.Objective().SetCoefficient(amount, 1)
    solver.Objective().SetMaximization()
    assert solver.Solve() == solver.OPTIMAL
    return solver.Objective().Value()


def direct_network(seed):
    """Returns a connected network of 3 to 5 ranks without switches. Each rank's outgoing bandwidth
    equals its incoming bandwidth.
    """
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 6))
    total = {}
    for _ in range(int(rng.integers(1, 4))):
        order = rng.permutation(count)
        size = count if not total else int(rng.integers(2, count + 1))
        units = Fraction(int(rng.integers(1, 9)), int(rng.choice([1, 2, 3])))
        for src, dst in zip(order[:size], np.roll(order[:size], -1), strict=True):
            total[f"n{src}", f"n{dst}"] = total.get((f"n{src}", f"n{dst}"), 0) + units
    links = tuple(Link(*pair, rate) for pair, rate in total.items())
    return Topology(f"direct {seed}", tuple(f"n{i}" for i in range(count)), (), links)


@pytest.mark.parametrize("seed", range(0, 300, 10))
def test_programme_over_cuts_equals_the_one_over_all_trees(seed):
    for each in range(seed, seed + examples(10)):
        topology = direct_network(each)
        best = optimal_all_reduce(topology)
        assert best.exact, topology.name
        assert float(best.rate) == pytest.approx(rate_by_trees(topology), rel=1e-6), topology.name


@pytest.mark.parametrize("seed", range(0, 60, 10))
def test_trees_of_random_networks_attain_the_bound(seed):
    for each in range(seed, seed + examples(10)):
        topology = random_eulerian(each)
        if len(topology.ranks) < 2:
            continue
        best = optimal_all_reduce(topology)
        assert best.exact and best.rate >= optimal(topology).algbw / 2, topology.name
        result = forest(topology, "all_reduce")
        assert optimal(topology).algbw / 2 <= result.algbw <= best.bound
        for name in algorithms(topology, "all_reduce"):
            if name != "taccl":
                program = synthesize(topology, "all_reduce", name)
                assert simulate(program, topology, 1 << 20).algbw <= float(best.bound) * (1 + 1e-9)


@pytest.mark.parametrize("name", [pytest.param("mesh4x4", marks=slow), "mesh2x3", "mesh3x3"])
def test_weighted_roots_make_right_programs_that_come_near_the_bound(name):
    topology = named(name)
    best = optimal_all_reduce(topology)
    built = forest(topology, "all_reduce")
    assert built.algbw == best.rate > optimal(topology).algbw / 2
    carried = dict.fromkeys(topology.capacities(), 0)
    for tree in (*built.reducing, *built.gathering):
        for edge in tree.edges:
            for path, units in edge.paths:
                for link in itertools.pairwise(path):
                    carried[link] += units
    units = sum(tree.count for tree in built.gathering)
    for link, capacity in topology.capacities().items():
        assert carried[link] <= units / best.rate * capacity
    program = synthesize(topology, "all_reduce")
    check(program)
    rng = np.random.default_rng(3)
    inputs = [rng.integers(-1000, 1000, 97) for _ in topology.ranks]
    for got, wanted in zip(
        execute(program, inputs), reference_result("all_reduce", inputs), strict=True
    ):
        assert np.array_equal(got, wanted)
    _, result = tune_pieces(program, topology, 1 << 30, most_operations=140_000)
    assert 0.9 * float(best.bound) < result.algbw <= float(best.bound)
