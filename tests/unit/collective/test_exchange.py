"""All-to-all by flows: known times, bounds by hand and brute force, and programs that
attain them.
"""

from fractions import Fraction

import numpy as np
import pytest

from ark.collective.bounds import least_us
from ark.collective.exchange import exchange
from ark.collective.programs import check, execute, reference_result
from ark.collective.simulate import simulate, tune_pieces
from ark.collective.synthesis import algorithms, synthesize
from ark.collective.topology import named
from ark.errors import InvalidUsageError, UnsupportedError
from tests.slow import slow
from tests.unit.collective.networks import random_eulerian

# Seconds in which every pair of ranks exchanges 1 GB. In rings the time is the sum of the distances
# of all pairs divided by the number of links. mesh4x4: 8 * 8 pairs cross the 4 middle links.
# hypercube: 8 * 12 / 24. DGX boxes: the bytes that leave a box over its NICs.
KNOWN = {
    "ring5": 3,
    "ring8": 8,
    "mesh4x4": 16,
    "torus4x4": 8,
    "hypercube3": 4,
    "full8": 1,
    "star6": 5,
    "a100x2": Fraction(64, 200),
    "h100x2": Fraction(64, 400),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_times_are_proven_and_attained(name):
    actual = exchange(named(name))
    assert actual.lower_bound == KNOWN[name]
    assert actual.lower_bound <= actual.inv_rate <= actual.lower_bound * Fraction(102, 100)


def cut_bound(topology):
    """Returns the largest ratio, over all sets of nodes, of the data that leaves the set to the
    bandwidth of the links that leave it.
    """
    nodes, capacity = topology.nodes, topology.capacities()
    best = Fraction(0)
    for bits in range(1, 2 ** len(nodes) - 1):
        side = {node for i, node in enumerate(nodes) if bits >> i & 1}
        inside = len(side & set(topology.ranks))
        pairs = inside * (len(topology.ranks) - inside)
        leaving = sum(rate for (a, b), rate in capacity.items() if a in side and b not in side)
        best = max(best, Fraction(pairs) / leaving)
    return best


@pytest.mark.parametrize("seed", range(0, 100, 20))
def test_on_random_networks_the_bound_is_above_every_cut_and_below_every_program(seed):
    for each in range(seed, seed + 20):
        topology = random_eulerian(each)
        if len(topology.ranks) < 2:
            continue
        actual = exchange(topology)
        assert cut_bound(topology) <= actual.lower_bound <= actual.inv_rate, topology.name
        assert actual.inv_rate <= actual.lower_bound * Fraction(13, 10), topology.name
        for paths in actual.shares.values():
            assert sum(count for _, count in paths) == actual.parts
        size = 1 << 20
        least = least_us(topology, "all_to_all", size)
        for name in set(algorithms(topology, "all_to_all")) - {"taccl"}:
            program = synthesize(topology, "all_to_all", name)
            assert simulate(program, topology, size).time_us >= least * (1 - 1e-9)


@pytest.mark.parametrize(
    "name", ["ring8", "mesh2x3", "dgx1v", pytest.param("mi250", marks=slow), "hypercube3"]
)
def test_programs_are_right_and_come_near_the_bound(name):
    topology = named(name)
    program = synthesize(topology, "all_to_all", "flow")
    check(program)
    rng = np.random.default_rng(1)
    ranks = len(topology.ranks)
    inputs = [rng.integers(-(2**40), 2**40, 12 * ranks) for _ in range(ranks)]
    wanted = reference_result("all_to_all", inputs)
    for got, expected in zip(execute(program, inputs, 1), wanted, strict=True):
        assert np.array_equal(got, expected)
    size = 1 << 28
    _, result = tune_pieces(program, topology, size)
    _, plain = tune_pieces(synthesize(topology, "all_to_all", "one_shot"), topology, size)
    least = least_us(topology, "all_to_all", size)
    assert least <= result.time_us < least * 1.03
    assert result.time_us < plain.time_us


def test_other_collectives_and_large_networks_are_refused():
    with pytest.raises(InvalidUsageError, match="all_to_all only"):
        synthesize("ring4", "all_gather", "flow")
    with pytest.raises(UnsupportedError, match="at most"):
        exchange(named("h100x64"))


@pytest.mark.parametrize(
    ("collective", "size", "wanted"),
    [
        ("broadcast", 10**9, 1e6 / 2),  # two links leave the root
        ("reduce", 10**9, 1e6 / 2),
        ("all_gather", 10**9, 1e6 * 7 / 16),
        ("reduce_scatter", 10**9, 1e6 * 7 / 16),
        ("all_reduce", 10**9, 1e6 * 7 / 8),
        ("all_to_all", 8 * 10**9, 8e6),
    ],
)
def test_bounds_of_a_ring_of_eight(collective, size, wanted):
    assert least_us(named("ring8"), collective, size) == pytest.approx(wanted)
