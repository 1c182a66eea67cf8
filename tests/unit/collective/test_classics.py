"""Classic collectives: right for every number of ranks, with the steps and bytes of textbooks."""

import math

import numpy as np
import pytest

from ark.collective import classics
from ark.collective.classics import trees
from ark.collective.classics.order import widest_ring
from ark.collective.programs import Collective, Kind, check, execute, in_order
from ark.collective.simulate import simulate, tune_pieces
from ark.collective.synthesis import synthesize
from ark.collective.topology import named
from ark.errors import InvalidUsageError
from tests.cases.collective_programs import boxes_for


def puts_of(program):
    return [op for ops in program.operations for op in ops if op.kind is Kind.PUT]


def sent_chunks(program):
    """Returns the largest number of chunks that a rank sends, divided by the number of chunks."""
    sent = [sum(op.dst.count for op in ops if op.kind is Kind.PUT) for ops in program.operations]
    return max(sent) / program.chunks


@pytest.mark.parametrize("ranks", [*range(1, 10), 12, 16])
@pytest.mark.parametrize("collective", list(Collective))
def test_every_algorithm_passes_the_checker_and_sums_like_numpy(collective, ranks):
    boxes = boxes_for(ranks)
    names = classics.supported(collective, ranks, boxes)
    assert names
    rows = np.random.default_rng(ranks).integers(-99, 99, (ranks, 2 * ranks))
    for name in names:
        program = classics.build(name, collective, ranks, boxes=boxes)
        check(program)
        got = execute(program, list(rows), seed=1)
        if collective is Collective.ALL_REDUCE:
            for out in got:
                np.testing.assert_array_equal(out, rows.sum(0))
        elif collective is Collective.ALL_GATHER:
            for out in got:
                np.testing.assert_array_equal(out, rows.ravel())
        elif collective is Collective.REDUCE_SCATTER:
            np.testing.assert_array_equal(np.concatenate(got), rows.sum(0))
        elif collective is Collective.REDUCE:
            np.testing.assert_array_equal(got[0], rows.sum(0))
        elif collective is Collective.BROADCAST:
            for out in got:
                np.testing.assert_array_equal(out, rows[0])
        else:
            swapped = rows.reshape(ranks, ranks, 2).transpose(1, 0, 2).reshape(ranks, -1)
            np.testing.assert_array_equal(np.array(got), swapped)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_steps_and_traffic_are_the_textbooks(ranks):
    log = int(math.log2(ranks))
    share = (ranks - 1) / ranks
    wanted = {
        ("ring", "all_gather"): (ranks - 1, share),
        ("ring", "reduce_scatter"): (ranks - 1, share),
        ("ring", "all_reduce"): (2 * (ranks - 1), 2 * share),
        ("bidirectional_ring", "all_reduce"): (2 * (ranks - 1), 2 * share),
        ("recursive_doubling", "all_gather"): (log, share),
        ("recursive_doubling", "all_reduce"): (log, log),
        ("recursive_halving", "reduce_scatter"): (log, share),
        ("recursive_halving", "all_reduce"): (2 * log, 2 * share),
        ("one_shot", "all_gather"): (1, share),
        ("one_shot", "all_reduce"): (1, ranks - 1),
        ("two_shot", "all_reduce"): (2, 2 * share),
        ("one_shot", "all_to_all"): (1, share),
        ("ring", "broadcast"): (ranks - 1, 1),
    }
    for (name, collective), (steps, traffic) in wanted.items():
        program = classics.build(name, collective, ranks)
        assert check(program).steps == steps, (name, collective)
        assert sent_chunks(program) == pytest.approx(traffic), (name, collective)


def test_hierarchical_crosses_boxes_once_for_each_share():
    boxes = [[0, 1, 2, 3], [4, 5, 6, 7]]
    program = classics.build("hierarchical", "all_gather", 8, boxes=boxes)
    crossing = [
        (rank, op.peer)
        for rank, ops in enumerate(program.operations)
        for op in ops
        if op.peer is not None and rank // 4 != op.peer // 4
    ]
    assert sorted(crossing) == [(r, (r + 4) % 8) for r in range(8)]


def test_rings_from_every_place_cross_boxes_on_different_ranks():
    boxes = [[0, 1, 2, 3], [4, 5, 6, 7]]
    program = classics.build("ring", "all_gather", 8, boxes=boxes)
    check(program)
    sent = [0] * 8
    for rank, ops in enumerate(program.operations):
        for op in ops:
            if op.peer is not None and rank // 4 != op.peer // 4:
                sent[rank] += op.dst.count
    assert len(set(sent)) == 1 and sent[0] * 4 == 7 * program.chunks / 8


@pytest.mark.parametrize("ranks", range(2, 40))
def test_two_trees_are_shallow_and_share_no_inner_rank(ranks):
    pair = trees.two_trees(list(range(ranks)))
    inner = []
    for tree in pair:
        roots = [rank for rank, parent in tree.items() if parent is None]
        assert len(roots) == 1 and sorted(tree) == list(range(ranks))
        depth = {}
        for rank in trees.top_down(tree):
            depth[rank] = 0 if tree[rank] is None else depth[tree[rank]] + 1
        assert max(depth.values()) <= math.ceil(math.log2(ranks)) + 1
        children = {}
        for rank, parent in tree.items():
            if parent is not None:
                children.setdefault(parent, []).append(rank)
        assert max(map(len, children.values())) <= 2
        inner.append({r for r, below in children.items() if len(below) == 2})
    assert not inner[0] & inner[1]


def test_trees_over_boxes_are_chains_behind_trees():
    boxes = [list(range(8 * box, 8 * box + 8)) for box in range(4)]
    forest = trees.chained_trees(boxes)
    assert len(forest) == 16
    for number, tree in enumerate(forest):
        assert sorted(tree) == list(range(32)) and list(tree.values()).count(None) == 1
        across = [(r, p) for r, p in tree.items() if p is not None and r // 8 != p // 8]
        assert len(across) == 3  # one edge into every other box, all of them at one local rank
        assert {r % 8 for edge in across for r in edge} == {number // 2}
        trees.top_down(tree)
    program = classics.build("double_binary_tree", "all_reduce", 32, boxes=boxes)
    check(program)
    network = named("h100x4")
    plain = classics.build("double_binary_tree", "all_reduce", 32)
    times = [tune_pieces(p, network, 1 << 28)[1].time_us for p in (program, plain)]
    assert times[0] < times[1] / 3  # eight NICs of a box at once instead of one


def test_rank_sends_its_own_data_without_waiting():
    """The operations in each rank's list are ordered so that the first put of a rank waits for
    nothing.
    """
    for name in ("ring", "bidirectional_ring", "two_shot", "recursive_halving"):
        program = classics.build(name, "all_reduce", 8)
        for ops in program.operations:
            first = next(i for i, op in enumerate(ops) if op.kind is Kind.PUT)
            assert not any(op.deps for op in ops[: first + 1])
        assert len(in_order(program)) == sum(map(len, program.operations))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("star", "all_gather", 4), "'star' is not an algorithm"),
        (("two_shot", "all_gather", 4), "does not support all_gather"),
        (
            ("ring", "all_sum", 4),
            "the collective 'all_sum' does not exist; choose one of all_gather",
        ),
        (("recursive_doubling", "all_gather", 6), "power of two"),
        (("hierarchical", "all_gather", 4), "boxes of equal size"),
        (("ring", "all_gather", 0), "at least one rank"),
        (("adasum_tree", "all_reduce", 6), "power of two"),
    ],
)
def test_unsupported_numbers_of_ranks_are_named(arguments, says):
    with pytest.raises(InvalidUsageError, match=says):
        classics.build(*arguments)


def test_options_that_do_not_fit_are_named():
    for options, says in (
        ({"boxes": [[0, 1], [2]]}, "boxes of equal size"),
        ({"reduction": "adasum"}, "not by adasum"),
        ({"reduction": "median"}, "no such reduction"),
        ({"pieces": 0}, "one piece"),
    ):
        with pytest.raises(InvalidUsageError, match=says):
            classics.build("ring", "all_reduce", 4, **options)
    with pytest.raises(InvalidUsageError, match="root"):
        classics.build("ring", "broadcast", 4, root=4)


@pytest.mark.parametrize(
    ("name", "gbps"),
    [("dgx1v", 50 * 8 / 7), ("mesh4x4", 16 / 15), ("torus4x4", 16 / 15), ("hypercube3", 8 / 7)],
)
def test_rings_follow_the_links(name, gbps):
    topology = named(name)
    order = widest_ring(topology)
    assert sorted(order) == list(range(len(topology.ranks))) and order[0] == 0
    capacity = topology.capacities()
    hops = zip(order, order[1:] + order[:1], strict=True)
    widths = [capacity[topology.ranks[a], topology.ranks[b]] for a, b in hops]
    assert min(widths) * len(order) / (len(order) - 1) == pytest.approx(gbps)
    program = synthesize(topology, "all_gather", "ring")
    check(program)
    assert simulate(program, topology, 1 << 30).algbw == pytest.approx(gbps, rel=1e-3)


def test_ring_without_a_circuit_takes_the_order_of_numbers():
    assert widest_ring(named("mesh3x3")) == list(range(9))
    assert widest_ring(named("a100")) == list(range(8))
    for root in (0, 5):
        check(synthesize(named("dgx1v"), "broadcast", "ring", root=root))
