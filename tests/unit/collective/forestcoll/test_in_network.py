"""Switches that multicast and reduce: rates of the synthesised trees and their bounds, compared
with values by hand and with a linear program over all trees.
"""

import dataclasses
import itertools
import random
from fractions import Fraction

import numpy as np
import pytest

from ark.collective.bounds import least_us
from ark.collective.forestcoll import forest, optimal_all_reduce
from ark.collective.forestcoll.in_network import draw_joint, loads
from ark.collective.packages import require
from ark.collective.programs import check, execute, reference_result
from ark.collective.simulate import simulate
from ark.collective.synthesis import synthesize
from ark.collective.topology import Link, Topology, named
from tests.slow import examples

# The bound and the trees' rate in GB/s. By hand, for M bytes: on one switch of 450 GB/s a rank
# sends and receives M if the switch reduces. It sends and receives 7/4 M if the switch only
# multicasts, because ranks then reduce. Between two boxes with NICs of 50 GB/s, M crosses the eight
# NICs of a box in each direction.
KNOWN = {
    "h100": (Fraction(1800, 7), Fraction(1800, 7)),
    "h100:inside=multicast": (Fraction(1800, 7), Fraction(1800, 7)),
    "h100:inside=reducing": (450, 450),
    "h100x2:inside=reducing": (400, 400),
    "h100x2:inside=reducing,between=reducing": (400, 400),
    "h100x4:inside=reducing,between=reducing": (400, 400),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_rates(name):
    topology = named(name)
    best = optimal_all_reduce(topology, in_network=True)
    bound, rate = KNOWN[name]
    assert best.exact and best.bound == bound
    assert least_us(topology, "all_reduce", 9 * 10**9) == pytest.approx(9e6 / float(bound))
    assert forest(topology, "all_reduce").algbw == rate


def test_program_equals_the_counts_of_the_trees():
    """In the program of an all-reduce in a box whose switch reduces, every port of the switch
    carries the data once, as the trees' counts say, and the sums are right.
    """
    topology = named("h100:inside=reducing")
    program = synthesize(topology, "all_reduce")
    check(program)
    size = 8 << 20
    carried = simulate(program, topology, size).link_bytes
    assert all(each == pytest.approx(size) for each in carried.values())
    pieces = dataclasses.replace(program, pieces=64)
    large = simulate(pieces, topology, 1 << 30)
    assert least_us(topology, "all_reduce", 1 << 30) / large.time_us > 0.97
    inputs = [np.random.default_rng(rank).integers(-99, 99, 64) for rank in range(8)]
    for got, want in zip(
        execute(program, inputs), reference_result("all_reduce", inputs), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_one_tree_of_height_one_does_a_rooted_collective(collective):
    topology = named("h100:inside=reducing")
    result = forest(topology, collective, root="g3")
    assert (result.trees, result.height, result.algbw) == (1, 1, 450)
    plain = forest(named("h100"), collective, root="g3")
    assert plain.algbw == 450 and plain.height > 1
    size = 1 << 20
    carried = simulate(synthesize(topology, collective, root=3), topology, size).link_bytes
    port = ("g3", "s0") if collective == "broadcast" else ("s0", "g3")
    assert carried[port] == size


def test_surplus_bandwidth_out_of_a_switch_helps_if_it_multicasts():
    """A switch that multicasts may send more than it receives: uplinks are slow and downlinks fast,
    so an all-gather is bound by the bytes that each rank receives.
    """
    links = [Link(f"g{i}", "s", 1) for i in range(4)] + [Link("s", f"g{i}", 3) for i in range(4)]
    plain = Topology("uneven", tuple(f"g{i}" for i in range(4)), ("s",), tuple(links))
    able = dataclasses.replace(plain, multicast=("s",))
    assert forest(plain, "all_gather").algbw == Fraction(4, 3)
    assert forest(able, "all_gather").algbw == 4
    size = 12 * 10**6
    assert least_us(able, "all_gather", size) == pytest.approx(3e3)
    carried = simulate(synthesize(able, "all_gather"), able, size).link_bytes
    assert carried["g0", "s"] == pytest.approx(size / 4)


def small(seed):
    """Returns three or four ranks and a switch which may or may not multicast and reduce. Links are
    in pairs of equal bandwidth.
    """
    rng = random.Random(seed)
    ranks = tuple(f"g{i}" for i in range(rng.randint(3, 4)))
    ends = [(rank, "s") for rank in ranks]
    others = list(itertools.combinations(ranks, 2))
    ends += rng.sample(others, rng.randint(0, 5 - len(ranks)))
    links = []
    for a, b in ends:
        rate = Fraction(rng.randint(1, 6), rng.choice([1, 1, 2]))
        links += [Link(a, b, rate), Link(b, a, rate)]
    able = rng.choice([(("s",), ()), ((), ("s",)), (("s",), ("s",))])
    return Topology(f"small {seed}", ranks, ("s",), tuple(links), (), *able)


def steiner_trees(topology, able):
    """Yields (root, links, times) of every way to reach all ranks from a root.

    The links form a tree over the ranks, and over the switch if it multicasts. A switch that does
    not multicast lies on paths between two ranks, and its links may be used several times; times:
    how often each link is used.
    """
    ranks = topology.ranks
    pairs = list(topology.capacities())
    if able:
        ways = {pair: (pair,) for pair in pairs}
        nodes = topology.nodes
    else:
        ways = {pair: (pair,) for pair in pairs if "s" not in pair}
        ways.update({(a, b): ((a, "s"), ("s", b)) for a, b in itertools.permutations(ranks, 2)
                     if (a, b) not in ways})  # fmt: skip
        ways.update({(a, b, "s"): ((a, "s"), ("s", b)) for a, b in itertools.permutations(ranks, 2)
                     if (a, b) in pairs})  # fmt: skip
        nodes = ranks
    for count in {len(ranks) - 1, len(nodes) - 1}:
        for chosen in itertools.combinations(ways, count):
            heads = [way[1] for way in chosen]
            members = {end for way in chosen for end in way[:2]}
            if len(set(heads)) < count or len(members) != count + 1 or not members >= set(ranks):
                continue
            (root,) = members - set(heads)
            reached = {root}
            for _ in range(count):
                reached |= {way[1] for way in chosen if way[0] in reached}
            if reached == members:
                yield root, [link for way in chosen for link in ways[way]]


def rate_by_trees(topology):
    """Returns the best rate of an all-reduce, by a linear program over explicit trees."""
    solver = require("ortools.linear_solver.pywraplp").Solver.CreateSolver("GLOP")
    rows = {k: solver.Constraint(0, float(rate)) for k, rate in topology.capacities().items()}
    balance = {root: solver.Constraint(0, 0) for root in topology.nodes}
    for direction, able in ((1, topology.multicast), (-1, topology.reduces)):
        for root, links in steiner_trees(topology, able):
            if root == "s" and not (topology.multicast and topology.reduces):
                continue
            amount = solver.NumVar(0, solver.infinity(), "")
            balance[root].SetCoefficient(amount, direction)
            for src, dst in links:
                row = rows[(src, dst) if direction == 1 else (dst, src)]
                row.SetCoefficient(amount, row.GetCoefficient(amount) + 1)
            if direction == 1:
                solver.Objective().SetCoefficient(amount, 1)
    solver.Objective().SetMaximization()
    assert solver.Solve() == solver.OPTIMAL
    return solver.Objective().Value()


@pytest.mark.parametrize("seed", range(0, 60, 20))
def test_bound_is_reached_by_all_trees_concurrently(seed):
    for each in range(seed, seed + examples(20)):
        topology = small(each)
        best = optimal_all_reduce(topology, in_network=True)
        assert float(best.bound) == pytest.approx(rate_by_trees(topology), rel=1e-6), topology.name
        drawn = draw_joint(topology)
        assert drawn is None or drawn[0] <= best.bound
        assert forest(topology, "all_reduce").algbw <= best.bound


def test_loads_count_a_multicast_once():
    topology = named("h100:gpus=4,inside=multicast")
    (tree,) = forest(topology, "broadcast", root="g0").gathering
    assert loads([tree], ["s0"])["g0", "s0"] == tree.count
    assert loads([tree], [])["g0", "s0"] == 3 * tree.count
