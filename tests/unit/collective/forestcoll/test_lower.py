"""Forests of trees lowered to collective programs: the checker accepts the programs, and their
results equal the reference bit for bit.
"""

import numpy as np
import pytest

from ark.collective import topology
from ark.collective.forestcoll import COLLECTIVES, forest, lower
from ark.collective.programs import Kind, check, execute, reference_result
from ark.collective.simulate import simulate
from ark.collective.synthesis import algorithms, synthesize
from ark.errors import InvalidUsageError
from tests.unit.collective.networks import random_eulerian

NAMES = ["ring5", "dgx1v", "a100x2", "ndv2x2", "mesh2x3", "mi250"]


def make(network, collective, **options):
    rooted = collective in ("broadcast", "reduce")
    return lower(forest(network, collective, root=network.ranks[-1] if rooted else None), **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_programs_of_known_networks_are_right(name, collective):
    network = topology.named(name)
    program = make(network, collective)
    check(program)
    ranks = len(network.ranks)
    rng = np.random.default_rng(7)
    inputs = [rng.integers(-(2**40), 2**40, 12 * ranks) for _ in range(ranks)]
    wanted = reference_result(collective, inputs, root=program.root)
    for seed in (None, 1):
        for got, expected in zip(execute(program, inputs, seed), wanted, strict=True):
            assert (got is None) == (expected is None)
            assert got is None or np.array_equal(got, expected)


@pytest.mark.parametrize("reduction", ["max", "min", "mean"])
def test_other_reductions_and_pieces(reduction):
    network = random_eulerian(11)
    program = make(network, "all_reduce", reduction=reduction, pieces=3)
    check(program)
    rng = np.random.default_rng(3)
    inputs = [rng.integers(0, 1000, 97) for _ in network.ranks]
    wanted = reference_result("all_reduce", inputs, reduction)
    for got, expected in zip(execute(program, inputs), wanted, strict=True):
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("collective", ["all_gather", "all_reduce"])
def test_window_keeps_programs_right_and_starts_the_next_level_sooner(collective):
    network = topology.named("a100x4")
    at_once, in_turn = make(network, collective), make(network, collective, window=1)
    assert check(in_turn).puts == check(at_once).puts
    rng = np.random.default_rng(5)
    inputs = [rng.integers(0, 2**30, 64) for _ in network.ranks]
    for got, expected in zip(
        execute(in_turn, inputs), reference_result(collective, inputs), strict=True
    ):
        assert np.array_equal(got, expected)
    size = 1 << 30
    times = [simulate(each, network, size).time_us for each in (at_once, in_turn)]
    assert times[1] < times[0]


@pytest.mark.parametrize("name", ["a100x2", "dgx1v", "mi250"])
def test_no_link_carries_more_than_the_optimum_says(name):
    network = topology.named(name)
    built = forest(network)
    size = 1 << 26
    result = simulate(lower(built), network, size)
    least = size / len(network.ranks) * built.optimum.inv_x
    for link, carried in result.link_bytes.items():
        assert carried / network.capacities()[link] <= least * (1 + 1e-9)
    assert result.time_us >= float(least) / 1e3


def test_every_put_follows_a_path_of_the_network():
    network = topology.named("a100x2")
    for operations in make(network, "all_reduce").operations:
        for operation in operations:
            if operation.kind is Kind.PUT:
                assert set(operation.route[1:-1]) <= set(network.switches)
                assert len(operation.route) == 3


def test_reducing_trees_send_on_after_everything_has_arrived():
    network = topology.named("dgx1v")
    result = forest(network, "reduce_scatter")
    for tree in result.reducing:
        senders = [edge.src for edge in tree.edges]
        assert sorted([*senders, tree.root]) == list(range(8))
        for place, edge in enumerate(tree.edges):
            assert edge.dst not in senders[:place]
        assert tree.height == tree.reversed().height
    assert result.height == forest(network).height


def test_synthesize_takes_names_and_checks():
    program = synthesize("ring4", "all_reduce", k=1)
    assert program.collective.value == "all_reduce"
    assert synthesize("ring4", "broadcast", root=2).root == 2
    for algorithm in algorithms(topology.named("star4"), "all_gather"):
        assert check(synthesize("star4", "all_gather", algorithm)).puts >= 8


@pytest.mark.parametrize(
    "options",
    [
        {"collective": "all_shuffle"},
        {"algorithm": "magic"},
        {"reduction": "product"},
        {"collective": "all_reduce", "reduction": "adasum"},
        {"collective": "broadcast", "root": 4},
        {"root": 1},
        {"algorithm": "ring", "k": 2},
        {"algorithm": "ring", "window": 2},
        {"pieces": 0},
        {"window": -1},
        {"collective": "all_to_all"},
    ],
)
def test_synthesize_refuses_invalid_arguments(options):
    collective = options.pop("collective", "all_gather")
    with pytest.raises(InvalidUsageError) as caught:
        synthesize("ring4", collective, **options)
    assert "\n" not in str(caught.value)
