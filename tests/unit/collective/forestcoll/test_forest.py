"""The steps of ForestColl one by one: cuts, fixed k, switch removal, packing, symmetry."""

import itertools
import math
import random
from dataclasses import replace
from fractions import Fraction

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ark.collective.forestcoll import forest, lower, optimal, optimal_all_reduce, trees
from ark.collective.forestcoll.cuts import violated_in
from ark.collective.forestcoll.forest import check
from ark.collective.forestcoll.network import network
from ark.collective.forestcoll.optimum import whole_units
from ark.collective.forestcoll.packing import packed_trees
from ark.collective.forestcoll.switches import remove_switches
from ark.collective.forestcoll.symmetry import find_symmetry, groups_of
from ark.collective.forestcoll.tree import Edge, Tree
from ark.collective.programs import check as check_program
from ark.collective.topology import Link, Topology, named, ring
from ark.errors import InternalError, InvalidUsageError, UnsupportedError
from tests.slow import examples, slow
from tests.unit.collective.networks import brute_force, planes, random_eulerian, verify

BOXES = ["a100x2", "h100x2", "mi300xx2", "dgx2x2", "mi250x2", "a100x3:fabric=rail", "dgx1v"]


def matrix_of(topology, k=None):
    best = optimal(topology, k)
    net = network(topology)
    matrix = np.zeros((len(topology.nodes),) * 2, dtype=np.int64)
    matrix[net.tails, net.heads] = whole_units(net, net.capacity(best.scale))
    return matrix, net.demand * best.k


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 5))
def test_violated_cuts_are_those_of_networkx(seed, demand):
    topology = random_eulerian(seed)
    net = network(topology)
    matrix = np.zeros((len(topology.nodes),) * 2, dtype=np.int64)
    matrix[net.tails, net.heads] = net.capacity(Fraction(6))
    graph = networkx.DiGraph()
    for tail, head in zip(*np.nonzero(matrix), strict=True):
        graph.add_edge(int(tail), int(head), capacity=int(matrix[tail, head]))
    for rank in range(net.ranks):
        graph.add_edge("s", rank, capacity=demand * (rank + 1))
    demands = np.array([demand * (rank + 1) for rank in range(net.ranks)], dtype=np.int64)
    least = min(networkx.maximum_flow_value(graph, "s", rank) for rank in range(net.ranks))
    actual = violated_in(matrix, demands)
    assert max((each.deficit for each in actual), default=0) == int(demands.sum()) - least
    for each in actual:
        leaving = int(matrix[np.ix_(each.side, ~each.side)].sum())
        inside = int(demands[each.side[: net.ranks]].sum())
        assert inside - leaving == each.deficit


@pytest.mark.parametrize("name", BOXES)
def test_removing_switches_keeps_cuts_and_paths(name):
    topology = named(name)
    matrix, demand = matrix_of(topology)
    direct = remove_switches(matrix, demand)
    assert direct.matrix.shape == (len(demand), len(demand))
    assert not violated_in(direct.matrix, demand)
    load = np.zeros_like(matrix)
    for (u, t), paths in direct.paths.items():
        assert sum(units for _, units in paths) == direct.matrix[u, t]
        for path, units in paths:
            assert (path[0], path[-1]) == (u, t)
            assert all(node >= len(demand) for node in path[1:-1])
            for pair in itertools.pairwise(path):
                load[pair] += units
    assert (load <= matrix).all()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[slow] * n.endswith("x2")) for n in BOXES])
def test_packing_without_the_symmetric_drawing(name):
    matrix, demand = matrix_of(named(name))
    direct = remove_switches(matrix, demand)
    load = np.zeros_like(direct.matrix)
    roots = np.zeros_like(demand)
    for tree in packed_trees(direct.matrix, demand):
        graph = networkx.DiGraph(tree.edges)
        assert networkx.is_arborescence(graph)
        assert len(graph) == len(demand)
        assert graph.in_degree(tree.root) == 0
        roots[tree.root] += tree.count
        for edge in tree.edges:
            load[edge] += tree.count
    assert (roots == demand).all()
    assert (load <= direct.matrix).all()


@pytest.mark.parametrize("name, k", [("mi250x2", 1), ("h100x4", 1), ("a100x2", 5), ("dgx1v", 4)])
def test_fixed_k_is_the_least_that_floors_allow(name, k):
    topology = named(name)
    best = optimal(topology, k)
    bandwidth = sorted(set(topology.capacities().values()))
    assert best.lower_bound <= best.inv_x <= best.lower_bound + 1 / (k * bandwidth[0])
    result = forest(topology, k=k)
    verify(topology, result)
    assert result.optimum == best
    # If U (trees per unit of bandwidth) were just below the optimum, some link would carry one tree
    # fewer, and a cut would have too little capacity.
    below = max(
        Fraction(math.ceil(best.scale * each) - 1) / each
        for each in bandwidth
        if best.scale * each > 1
    )
    net = network(topology)
    matrix = np.zeros((len(topology.nodes),) * 2, dtype=np.int64)
    matrix[net.tails, net.heads] = net.capacity(below)
    assert violated_in(matrix, net.demand * k)


def test_known_fixed_k():
    assert optimal(named("h100x4"), 1).inv_x == Fraction(14, 225)
    best = optimal(named("mi250x2"), 83)
    assert (best.inv_x, best.exact) == (Fraction(15, 166), True)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_fixed_k_on_any_eulerian_network(seed, k):
    topology = random_eulerian(seed)
    result = forest(topology, k=k)
    verify(topology, result)
    assert result.optimum.inv_x >= result.optimum.lower_bound


def test_isomorphic_trees_of_boxes_are_two_deep():
    for name in ("a100x2", "h100x4", "mi300xx2", "a100x4:fabric=leafspine,oversubscription=2"):
        assert forest(named(name)).height == 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [(1, 4, 2, 1), (2, 4, 4, 1), (3, 4, 2, 2)])
def test_isomorphic_switches_in_any_order(shape, seed):
    topology = planes(*shape, seed)
    assert find_symmetry(network(topology)).size == len(topology.ranks)
    result = forest(topology)
    verify(topology, result)
    assert result.height <= 3


def test_boxes_without_switches_get_no_chains():
    assert {tree.height for tree in trees(named("h100"))} == {1}


def test_symmetries_are_those_that_links_allow():
    assert find_symmetry(network(named("a100x4"))).size == 32
    assert find_symmetry(network(named("ring8"))).size == 8
    assert find_symmetry(network(named("a100x2+h100x2"))).size == 16
    lopsided = (*ring(6).links, Link("g0", "g1", Fraction(1)), Link("g1", "g0", Fraction(1)))
    broken = Topology("lopsided", ring(6).ranks, (), lopsided)
    assert find_symmetry(network(broken)).size == 1


def test_every_group_is_made_of_automorphisms():
    matrix, demand = matrix_of(named("torus4x4"))
    for group in itertools.islice(groups_of(matrix, demand), 4):
        assert (group.images[0] == np.arange(16)).all()
        for image in group.images:
            assert (matrix[np.ix_(image, image)] == matrix).all()
        assert sorted(itertools.chain(*group.orbits())) == list(range(16))


def test_check_refuses_wrong_trees():
    topology = named("ring4")
    net, best = network(topology), optimal(topology)
    good = trees(topology)
    demand = net.demand * best.k
    check(net, best.scale, demand, good)
    with pytest.raises(InternalError, match="trees per root"):
        check(net, best.scale, demand, good[1:])
    short = Tree(good[0].root, good[0].count, good[0].edges[:-1])
    with pytest.raises(InternalError, match="does not reach every rank"):
        check(net, best.scale, demand, (short, *good[1:]))
    with pytest.raises(InternalError, match="above its capacity"):
        check(net, best.scale / 2, demand, good)
    jump = Edge(0, 2, ((("g0", "g2"), 1),))
    with pytest.raises(InternalError):
        check(net, best.scale, demand, (Tree(0, 1, (jump, *good[0].edges[1:])), *good[1:]))


def test_same_input_gives_the_same_trees():
    for name in ("mi250", "dgx1v"):
        assert trees(named(name)) == trees(named(name))


@pytest.mark.parametrize("k", [0, -1, 1 << 30])
def test_k_out_of_range_is_refused(k):
    with pytest.raises(InvalidUsageError, match=f"k is {k}"):
        optimal(ring(4), k)


def test_invalid_arguments_are_refused():
    with pytest.raises(InvalidUsageError, match="no collective 'all_to_all'"):
        forest(ring(4), "all_to_all")
    with pytest.raises(InvalidUsageError, match="root"):
        forest(ring(4), "broadcast")
    with pytest.raises(InvalidUsageError, match="root"):
        forest(ring(4), "all_gather", root="g0")
    with pytest.raises(InvalidUsageError, match="ids of its ranks"):
        forest(ring(4), "broadcast", root="g9")
    with pytest.raises(InvalidUsageError, match="one rank"):
        optimal(Topology("one", ("g0",), (), ()))


def test_bandwidths_too_fine_for_64_bits_are_refused():
    primes = [10**9 + 7, 10**9 + 9, 998244353]
    links = []
    for index, prime in enumerate(primes):
        ends = (f"g{index}", f"g{(index + 1) % 3}")
        links += [Link(*ends, Fraction(3, prime)), Link(*ends[::-1], Fraction(3, prime))]
    with pytest.raises(UnsupportedError, match="64 bits"):
        optimal(Topology("fine", ("g0", "g1", "g2"), (), tuple(links)))


def degraded(seed):
    """Returns a random network in which one or two links have lost a part of their bandwidth."""
    topology = random_eulerian(seed)
    rng = random.Random(seed)
    links = list(topology.links)
    for _ in range(rng.randint(1, 2)):
        place = rng.randrange(len(links))
        slower = links[place].bandwidth / rng.choice([2, 3, 4])
        links[place] = replace(links[place], bandwidth=slower)
    return replace(topology, links=tuple(links))


@pytest.mark.parametrize("seed", range(0, 80, 10))
def test_networks_with_degraded_links_have_an_optimum_that_trees_attain(seed):
    for each in range(seed, seed + examples(10)):
        topology = degraded(each)
        if len(topology.ranks) < 2:
            continue
        result = forest(topology)
        verify(topology, result)
        assert result.optimum.exact, topology.name
        assert result.optimum.inv_x >= brute_force(topology)
        if not topology.switches:
            assert result.optimum.inv_x == brute_force(topology)
        scattered = forest(topology, "reduce_scatter")
        assert scattered.optimum == optimal(topology.reverse())
        all_reduce = forest(topology, "all_reduce")
        best = optimal_all_reduce(topology)
        assert best.exact and all_reduce.algbw <= best.rate
        if not topology.switches:
            assert all_reduce.algbw == best.rate, topology.name
        program = lower(all_reduce)
        check_program(program)


def test_switch_that_receives_more_than_it_sends():
    """Three ranks on a switch; g0 sends at 1 GB/s, all other links have 3 GB/s.

    All data of g0 pass its link of 1 GB/s, so the rate x* is at most 1. 7 GB/s enter the switch and
    9 GB/s can leave it: it is unbalanced, which the bounds by cuts do not take into account.
    """
    links = [Link(f"g{i}", "s", Fraction(3 if i else 1)) for i in range(3)]
    links += [Link("s", f"g{i}", Fraction(3)) for i in range(3)]
    topology = Topology("lame", ("g0", "g1", "g2"), ("s",), tuple(links))
    best = optimal(topology)
    assert best.inv_x == best.lower_bound == 1 and best.exact
    verify(topology, forest(topology))


def test_fixed_k_on_a_directed_network_rounds_no_more_than_it_must():
    """With k fixed to one tree per rank, a directed cycle of three ranks with one fast link has the
    optimal inverse rate 2.
    """
    links = [Link("a", "b", Fraction(5)), Link("b", "c", Fraction(1)), Link("c", "a", Fraction(1))]
    topology = Topology("cycle", ("a", "b", "c"), (), tuple(links))
    best = optimal(topology, 1)
    assert best.inv_x == best.lower_bound == 2
