"""TACCL: routing compared with brute force, sketches, symmetry, ordering, time limits, programs."""

import dataclasses
import itertools
import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ark.collective import taccl
from ark.collective.bounds import least_us
from ark.collective.programs import Kind, from_json, to_json, to_xml
from ark.collective.simulate import simulate
from ark.collective.taccl import (
    Sketch,
    default_sketch,
    logical,
    order,
    parse_size,
    route,
    synthesize_taccl,
)
from ark.collective.taccl.ordering import MAX_GROUPED_TRANSFERS
from ark.collective.topology import Link, Topology, load
from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from tests.cases.taccl import prove
from tests.slow import examples, slow

BYTES_PER_MIB = 1 << 20
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
DGX2X2 = {
    "nnodes": 2,
    "intranode_sketch": {
        "strategy": "switch",
        "switches": [list(range(16))],
        "switch_hyperedge_strategy": ["uc-min"],
    },
    "internode_sketch": {
        "strategy": "relay",
        "internode_conn": {str(i + 1): [i] for i in range(0, 16, 2)},
        "gpus_to_sender_rev_map": {str(i + 1): [i, i + 1] for i in range(0, 16, 2)},
        "enforce_ordering": True,
    },
    "symmetry_offsets": [[2, 16], [16, 32]],
    "hyperparameters": {"input_chunkup": 2},
}
NDV2X2 = {
    "nnodes": 2,
    "intranode_sketch": {"strategy": "none"},
    "internode_sketch": {"strategy": "relay", "internode_conn": {"0": [1]}},
    "symmetry_offsets": [[8, 16]],
    "hyperparameters": {"input_chunkup": 1},
}


def random_topology(seed):
    """Returns a strongly connected digraph of 3 or 4 ranks whose links have one of two
    bandwidths.
    """
    rng = random.Random(seed)
    n = rng.choice([3, 4])
    pairs = {(i, (i + 1) % n) for i in range(n)}
    pairs |= {p for p in itertools.permutations(range(n), 2) if rng.random() < 0.4}
    links = tuple(
        Link(f"g{a}", f"g{b}", rng.choice([10, 25]), rng.choice([0.0, 0.5]))
        for a, b in sorted(pairs)
    )
    return Topology("random", tuple(f"g{i}" for i in range(n)), (), links)


def every_tree(graph, owner):
    """Returns all spanning trees from the owner as tuples of links. No link leads towards the
    owner.
    """
    n = graph.ranks
    away = {owner: 0}
    queue = [owner]
    for rank in queue:
        for edge in graph.edges:
            if edge.src == rank and edge.dst not in away:
                away[edge.dst] = away[rank] + 1
                queue.append(edge.dst)
    ways = [
        [i for i, e in enumerate(graph.edges) if e.dst == r and away[e.src] <= away[r]]
        for r in range(n)
        if r != owner
    ]
    for choice in itertools.product(*ways):
        parent = {graph.edges[i].dst: i for i in choice}
        late = {owner: 0}
        for _ in range(n):
            for rank, i in parent.items():
                edge = graph.edges[i]
                if edge.src in late:
                    cost = round(BYTES_PER_MIB / edge.gbps) + round(edge.alpha_us * 1000)
                    late.setdefault(rank, late[edge.src] + cost)
        if len(late) == n:
            yield choice, max(late.values())


@pytest.mark.parametrize("seed", range(12))
def test_routing_is_optimal_by_brute_force(seed):
    topology = random_topology(seed)
    graph = logical(topology, Sketch())
    cost = [round(BYTES_PER_MIB / e.gbps) + round(e.alpha_us * 1000) for e in graph.edges]
    trees = [list(every_tree(graph, owner)) for owner in range(graph.ranks)]
    best = None
    for combination in itertools.product(*trees):
        load = [0] * len(cost)
        for links, _ in combination:
            for i in links:
                load[i] += cost[i]
        time = max(*load, *(late for _, late in combination))
        best = time if best is None else min(best, time)
    routing = route(graph, False, BYTES_PER_MIB, 30)
    assert routing.optimal and routing.gap == 0
    assert routing.time_us == pytest.approx(best / 1e3)


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(COLLECTIVES), st.integers(1, 2))
def test_programs_on_random_networks(seed, collective, chunkup):
    topology = random_topology(seed)
    sketch = Sketch(input_chunkup=chunkup)
    program = synthesize_taccl(topology, sketch, collective, 10)
    prove(program.program, topology, seed)
    assert program.time_us >= program.routing_us * 0.6  # the relaxed time counts latency on links


@pytest.mark.parametrize("name", ["ring8", "torus2x3", "hypercube3", "mi300x", "dgx1v", "star5"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_default_sketches_on_known_networks(name, collective):
    topology = load(name)
    program = synthesize_taccl(topology, None, collective, 20, size_bytes=64 * BYTES_PER_MIB)
    prove(program.program, topology)
    assert program.optimal and program.gap == 0
    bound = least_us(topology, collective, 64 * BYTES_PER_MIB)
    assert program.time_us >= bound * (1 - 1e-4)
    assert simulate(program.program, topology, 64 * BYTES_PER_MIB).time_us >= bound * (1 - 1e-9)


def test_known_optima_are_reached():
    """Known optima of an all-gather: a full mesh takes the time of one chunk; a ring of 8 ranks
    with two chunks per rank takes the time of seven chunks.
    """
    mesh = synthesize_taccl(load("mi300x"), None, "all_gather", size_bytes=8 * BYTES_PER_MIB)
    assert mesh.time_us == pytest.approx(BYTES_PER_MIB / 64e3 + 1.4, rel=0.1)
    ring = load("ring8:bandwidth=10,latency=0")
    program = synthesize_taccl(
        ring, default_sketch(ring, 2), "all_gather", size_bytes=16 * BYTES_PER_MIB
    )
    assert program.time_us == pytest.approx(7 * BYTES_PER_MIB / 10e3, rel=1e-3)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(
    "raw", [pytest.param(DGX2X2, marks=slow), NDV2X2], ids=["dgx2x2", "ndv2x2"]
)
def test_papers_sketches(raw, collective):
    topology = load("dgx2x2" if raw is DGX2X2 else "ndv2x2")
    sketch = Sketch.from_json(json.dumps(raw))
    program = synthesize_taccl(topology, sketch, collective, 30, size_bytes=32 * BYTES_PER_MIB)
    prove(program.program, topology)
    assert program.optimal
    assert from_json(to_json(program.program)) == program.program
    if collective == "all_gather":
        to_xml(program.program)
    size = len(topology.ranks) // 2
    pairs = {int(k): v for k, v in raw["internode_sketch"]["internode_conn"].items()}
    for rank, ops in enumerate(program.program.operations):
        for op in ops:
            if op.kind is Kind.PUT and rank // size != op.peer // size:
                ends = (rank % size, op.peer % size)
                if collective == "all_gather":
                    assert ends[1] in pairs[ends[0]]


def test_symmetric_chunks_take_symmetric_routes():
    topology = load("dgx2x2")
    graph = logical(topology, Sketch.from_json(DGX2X2))
    routing = route(graph, False, BYTES_PER_MIB, 30)
    sets = {
        (c.owner, c.index): {(graph.edges[i].src, graph.edges[i].dst) for i in links}
        for c, links in zip(routing.chunks, routing.links, strict=True)
    }

    def moved(rank):
        return rank // 16 * 16 + (rank % 16 + 2) % 16

    for (owner, index), links in sets.items():
        assert sets[moved(owner), index] == {(moved(a), moved(b)) for a, b in links}
        assert sets[(owner + 16) % 32, index] == {((a + 16) % 32, (b + 16) % 32) for a, b in links}


@slow
def test_senders_and_relay_map_say_the_same():
    raw = json.loads(json.dumps(DGX2X2))
    del raw["internode_sketch"]["gpus_to_sender_rev_map"]
    raw["internode_sketch"]["chunk_to_relay_map"] = [2, 1]
    for sketch in (Sketch.from_json(raw), Sketch.from_json(DGX2X2)):
        graph = logical(load("dgx2x2"), sketch)
        routing = route(graph, False, BYTES_PER_MIB, 30)
        for chunk, links in zip(routing.chunks, routing.links, strict=True):
            leaving = {graph.edges[i].sender for i in links} - {None}
            assert leaving == {chunk.owner % 16 // 2 * 2 + 1}


def test_few_or_many_connections():
    counts = {}
    for wish in ("uc-min", "uc-max"):
        switch = {
            "strategy": "switch",
            "switches": [list(range(6))],
            "switch_hyperedge_strategy": [wish],
        }
        sketch = Sketch.from_json({"intranode_sketch": switch, "symmetry_offsets": [[1, 6]]})
        routing = route(logical(load("star6"), sketch), False, BYTES_PER_MIB, 10)
        used = {i for links in routing.links for i in links}
        counts[wish] = len(used), routing.time_us
    assert counts["uc-min"][0] < counts["uc-max"][0] == 30
    assert counts["uc-min"][1] == pytest.approx(counts["uc-max"][1])


def test_schedule_respects_links_and_arrivals():
    topology = load("ndv2x2")
    graph = logical(topology, Sketch.from_json(NDV2X2))
    routing = route(graph, False, BYTES_PER_MIB, 30)
    schedule = order(graph, routing, BYTES_PER_MIB)
    at = {(c, chunk.owner): 0.0 for c, chunk in enumerate(routing.chunks)}
    by_edge, sent = {}, 0
    for send in sorted(schedule.sends, key=lambda s: s.start_us):
        edge = graph.edges[send.edge]
        assert all(at[c, edge.src] <= send.start_us + 1e-9 for c in send.chunks)
        expected = edge.alpha_us + len(send.chunks) * BYTES_PER_MIB / edge.gbps / 1e3
        assert send.end_us - send.start_us == pytest.approx(expected)
        assert by_edge.get(send.edge, 0.0) <= send.start_us + 1e-9
        assert len(send.chunks) <= MAX_GROUPED_TRANSFERS
        by_edge[send.edge] = send.end_us
        at.update({(c, edge.dst): send.end_us for c in send.chunks})
        sent += len(send.chunks)
    assert sent == sum(map(len, routing.links)) == 16 * 15
    assert schedule.time_us == max(by_edge.values())


def test_all_stages_share_one_deadline(monkeypatch):
    """An all-reduce has two phases: the first may use half of the time, and no stage passes the
    deadline.
    """
    deadlines = []
    real = taccl.order
    monkeypatch.setattr(taccl, "order", lambda *args: deadlines.append(args[3]) or real(*args))
    before = time.monotonic()
    synthesize_taccl(load("ring4"), None, "all_reduce", 1000.0)
    after = time.monotonic()
    assert (
        before + 500 <= deadlines[0] <= after + 500
        and before + 1000 <= deadlines[1] <= after + 1000
    )


def test_contiguity_merges_small_chunks_between_boxes():
    """Small chunks are sent together between boxes, which saves latency; large chunks are sent
    separately.
    """
    topology = load("ndv2x2")
    sketch = Sketch.from_json(NDV2X2)
    graph = logical(topology, sketch)
    small = order(graph, route(graph, False, 100.0, 10), 100.0)
    assert max(len(s.chunks) for s in small.sends) > 1
    late = order(graph, route(graph, False, 100.0, 10), 100.0, deadline=0.0)
    assert max(len(s.chunks) for s in late.sends) == 1  # no time was left to merge
    program = synthesize_taccl(topology, sketch, "all_gather", 10, size_bytes=1600)
    prove(program.program, topology)
    alone = synthesize_taccl(topology, sketch, "all_gather", 10, size_bytes=1 << 30)
    between = [
        sum(op.peer is not None and rank // 8 != op.peer // 8 for op in ops)
        for rank, ops in enumerate(program.program.operations)
    ]
    assert (
        sum(between)
        < 16
        <= sum(
            op.peer is not None and rank // 8 != op.peer // 8
            for rank, ops in enumerate(alone.program.operations)
            for op in ops
        )
    )
    for collective in ("all_to_all", "all_reduce"):
        tiny = synthesize_taccl(topology, sketch, collective, 10, size_bytes=1600)
        prove(tiny.program, topology)


def test_no_time_returns_the_best_found_with_its_gap():
    topology = load("torus4x4")
    program = synthesize_taccl(topology, None, "all_to_all", 0.02, size_bytes=16 * BYTES_PER_MIB)
    prove(program.program, topology)
    assert not program.optimal and 0 < program.gap <= 1
    long = synthesize_taccl(topology, None, "all_gather", 20, size_bytes=16 * BYTES_PER_MIB)
    assert long.optimal and long.gap == 0


def test_same_input_gives_the_same_bytes():
    topology = load("a100x2")
    texts = {to_json(synthesize_taccl(topology, None, "all_reduce", 30).program) for _ in range(2)}
    assert len(texts) == 1


@pytest.mark.parametrize("reduction", ["max", "min", "mean"])
def test_other_reductions(reduction):
    topology = load("ring5")
    program = synthesize_taccl(topology, None, "all_reduce", 10, reduction=reduction, pieces=2)
    assert program.program.reduction == reduction and program.program.pieces == 2
    prove(program.program, topology)


BAD_SKETCHES = {
    "json": ("{", "valid JSON"),
    "list": ("[]", "Expected .object."),
    "unknown": ({"colour": 1}, "'colour'"),
    "unknown inside": ({"internode_sketch": {"conn": {}}}, "internode_sketch: .*'conn'"),
    "nnodes": ({"nnodes": 0}, "nnodes: Expected .int. >= 1"),
    "strategy": (
        {"intranode_sketch": {"strategy": "magic"}},
        "strategy: Invalid enum value .magic.",
    ),
    "switches": (
        {"intranode_sketch": {"switches": [[0, "1"]]}},
        r"switches\[0\]\[1\]: Expected .int.",
    ),
    "hyperedge": (
        {"intranode_sketch": {"switch_hyperedge_strategy": ["x"]}},
        "strategy.*Invalid enum value .x.",
    ),
    "hyperedges": (
        {"intranode_sketch": {"switch_hyperedge_strategy": ["uc-min"]}},
        "one entry per switch",
    ),
    "conn": (
        {"internode_sketch": {"internode_conn": {"a": [1]}}},
        "internode_conn",
    ),
    "conn word": (
        {"internode_sketch": {"internode_conn": "all"}},
        "internode_conn: Invalid enum value .all.",
    ),
    "relay map": (
        {"internode_sketch": {"chunk_to_relay_map": [0, 1]}},
        r"chunk_to_relay_map\[0\]: Expected .int. >= 1",
    ),
    "beta split": (
        {"internode_sketch": {"beta_split": {"1": 0}}},
        "beta_split.*Expected .int. >= 1",
    ),
    "ordering": (
        {"internode_sketch": {"enforce_ordering": 1}},
        "enforce_ordering: Expected .bool.",
    ),
    "symmetry": ({"symmetry_offsets": [[4, 2]]}, "0 < offset < group"),
    "chunkup": ({"hyperparameters": {"input_chunkup": 10**9}}, "chunkup: Expected .int. <= 1024"),
    "size": ({"hyperparameters": {"input_size": "1X"}}, "not valid"),
}


@pytest.mark.parametrize("name", BAD_SKETCHES)
def test_bad_sketches_give_one_sentence(name):
    source, says = BAD_SKETCHES[name]
    with pytest.raises(ModelError, match=says) as caught:
        Sketch.from_json(source)
    assert "\n" not in str(caught.value)


MISFITS = {
    "nnodes": ({"nnodes": 3}, "must divide"),
    "local rank": ({"nnodes": 2, "internode_sketch": {"internode_conn": {"9": [0]}}}, "rank 9"),
    "no way out": (
        {"nnodes": 2, "internode_sketch": {"internode_conn": {}}},
        "forbids every route",
    ),
    "no way in the box": ({"nnodes": 2, "intranode_sketch": {"strategy": "relay"}}, "forbids"),
    "wrong sender": (
        {"nnodes": 2, "internode_sketch": {"gpus_to_sender_rev_map": {"0": [0]}}},
        "forbids every route from rank 1 ",
    ),
    "symmetry": (
        {"nnodes": 2, "symmetry_offsets": [[1, 8]]},
        "does not hold: the image",
    ),
    "symmetry groups": ({"nnodes": 2, "symmetry_offsets": [[1, 5]]}, "are not a multiple"),
    "symmetry of senders": (
        {
            "nnodes": 2,
            "internode_sketch": {"chunk_to_relay_map": [8, 0]},
            "symmetry_offsets": [[4, 8]],
        },
        "different senders",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_sketches_that_do_not_fit_give_one_sentence(name):
    raw, says = MISFITS[name]
    with pytest.raises(ModelError, match=says) as caught:
        synthesize_taccl(load("ndv2x2"), Sketch.from_json(raw), "all_gather", 5)
    assert "\n" not in str(caught.value)


def test_bad_calls_give_one_sentence():
    topology = load("ring4")
    for arguments, says in (
        ({"collective": "broadcast"}, "does not support broadcast"),
        ({"collective": "sum"}, "the collective 'sum' does not exist"),
        ({"time_limit_s": 0}, "time limit"),
        ({"size_bytes": 0}, "size"),
        ({"reduction": "adasum", "collective": "all_reduce"}, "not by adasum"),
    ):
        with pytest.raises(InvalidUsageError, match=says):
            synthesize_taccl(topology, **arguments)
    with pytest.raises(InvalidUsageError, match="time limit"):
        synthesize_taccl(topology, time_limit_s=float("nan"))
    with pytest.raises(UnsupportedError, match="exceed the limit of TACCL's model"):
        synthesize_taccl(load("a100x32"), None, "all_to_all")
    rail = load("a100x2:fabric=rail")
    far = {"nnodes": 2, "internode_sketch": {"internode_conn": {"0": [1]}}}
    with pytest.raises(ModelError, match="passes the rank"):
        synthesize_taccl(rail, Sketch.from_json(far), "all_gather")


@pytest.mark.parametrize("size", [1, 1 << 60])
def test_tiny_and_huge_sizes(size):
    topology = load("torus2x3:bandwidth=1/1000,latency=0.5")
    program = synthesize_taccl(topology, None, "all_to_all", 20, size_bytes=size)
    prove(program.program, topology)
    assert program.optimal and program.time_us >= program.routing_us * (1 - 1e-6) > 0


def test_sizes_and_sketch_defaults():
    assert [parse_size(s) for s in (7, "7", "2K", "3MB", "1G")] == [7, 7, 2048, 3 << 20, 1 << 30]
    sketch = default_sketch(load("a100x2"))
    assert sketch.nnodes == 2 and sketch.intranode == "switch"
    assert sketch.symmetry_offsets == ((8, 16), (1, 8))
    plain = default_sketch(load("ring6"))
    assert plain.symmetry_offsets == ((1, 6),) and plain.intranode == "none"
    split = dataclasses.replace(sketch, beta_split=((0, 2),), symmetry_offsets=())
    edges = logical(load("a100x2"), split).edges
    assert {e.gbps for e in edges if e.sender == 0} == {12.5}
    assert {e.gbps for e in edges if e.sender == 1} == {25.0}
