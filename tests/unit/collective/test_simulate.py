"""The simulator of collectives: times are those of closed formulas, links are shared fairly, no
data are lost, and no program is faster than the optimum.
"""

import dataclasses
import itertools
import json

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ark.collective import classics
from ark.collective.bounds import least_us
from ark.collective.programs import IN, OUT, Kind, ProgramBuilder, Span, check
from ark.collective.simulate import Routes, simulate, tune_pieces
from ark.collective.simulate.fair import fair_rates
from ark.collective.topology import (
    CostModel,
    Link,
    Protocol,
    Topology,
    TopologyError,
    from_json,
    load,
    named,
    star,
    to_json,
)
from ark.errors import InvalidUsageError, ModelError
from tests.cases.collective_programs import any_program

BYTES_PER_MB = 10**6


def line(*links, ranks=2, switches=()):
    names = tuple(f"g{i}" for i in range(ranks))
    return Topology("line", names, switches, tuple(Link(a, b, *rest) for a, b, *rest in links))


def broadcast(ranks, edges, chunks=1, routes=None):
    b = ProgramBuilder("b", "broadcast", ranks, chunks, root=0)
    b.copy(0, Span(IN, 0, chunks), Span(OUT, 0, chunks))
    for chunk in range(chunks):
        for i, (src, dst) in enumerate(edges):
            route = () if routes is None else routes[i]
            b.put(src, dst, Span(OUT, chunk), Span(OUT, chunk), route=route)
    program = b.build()
    check(program)
    return program


def test_one_put_is_alpha_plus_bytes_over_bandwidth():
    topology = line(("g0", "s", 100, 0.5), ("s", "g1", 50, 0.7), switches=("s",))
    result = simulate(broadcast(2, [(0, 1)]), topology, BYTES_PER_MB)
    assert result.time_us == pytest.approx(BYTES_PER_MB / 50e3 + 1.2)
    assert result.link_bytes == {("g0", "s"): BYTES_PER_MB, ("s", "g1"): BYTES_PER_MB}
    assert result.link_busy["g0", "s"] == pytest.approx(BYTES_PER_MB / 100e3 / result.time_us)
    assert result.algbw == pytest.approx(BYTES_PER_MB / result.time_us / 1e3)


@pytest.mark.parametrize("chunks", [1, 2, 8, 64])
def test_chunks_pipeline_over_a_chain(chunks):
    """A broadcast of chunks along a chain of ranks takes (hops + chunks - 1) times the time of a
    chunk, plus one latency per hop.
    """
    topology = line(*[(f"g{i}", f"g{i + 1}", 10, 2.0) for i in range(4)], ranks=5)
    program = broadcast(5, [(i, i + 1) for i in range(4)], chunks)
    chunk = BYTES_PER_MB / chunks / 10e3
    expected = (4 + chunks - 1) * chunk + 4 * 2.0
    assert simulate(program, topology, BYTES_PER_MB).time_us == pytest.approx(expected)
    pieces = dataclasses.replace(broadcast(5, [(i, i + 1) for i in range(4)]), pieces=chunks)
    assert simulate(pieces, topology, BYTES_PER_MB).time_us == pytest.approx(expected)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ring_times_are_the_textbooks(ranks):
    topology = load(f"ring{ranks}:bandwidth=20,latency=1.5")
    step = BYTES_PER_MB / ranks / 20e3 + 1.5
    for collective, steps in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        program = classics.build("ring", collective, ranks)
        if ranks > 2:  # with two ranks both directions are one link
            time = simulate(program, topology, BYTES_PER_MB).time_us
            assert time == pytest.approx(steps * (ranks - 1) * step)


def test_puts_share_a_link_fairly_and_speed_up_when_one_ends():
    """Puts of 1 and 2 units share a link of rate 1: the first ends after 2 units of time, and the
    other one then has the whole link.
    """
    topology = line(
        *[("g0", "s", 1, 0), ("s", "g1", 9, 0), ("s", "g2", 9, 0)], ranks=3, switches=("s",)
    )
    b = ProgramBuilder("b", "broadcast", 3, 2, root=0)
    b.copy(0, Span(IN, 0, 2), Span(OUT, 0, 2))
    short = b.put(0, 1, Span(OUT, 0), Span(OUT, 0))
    long = b.put(0, 2, Span(OUT, 0, 2), Span(OUT, 0, 2))
    rest = b.put(0, 1, Span(OUT, 1), Span(OUT, 1))
    program = b.build()
    check(program)
    end = {e.ref: e.end_us for e in simulate(program, topology, 2000).events}
    assert end[short] == pytest.approx(2.0)
    assert end[long] == pytest.approx(4.0)
    assert end[rest] == pytest.approx(4.0)


def test_port_limits_overheads_and_local_work_cost_time():
    topology = load("full4:bandwidth=10,latency=0")
    program = classics.build("one_shot", "all_gather", 4)
    free = simulate(program, topology, 4000).time_us
    assert free == pytest.approx(0.1)
    ports = CostModel(ports={f"g{i}": 15 for i in range(4)})
    assert simulate(program, topology, 4000, ports).time_us == pytest.approx(0.2)
    slow = CostModel(put_overhead_us=3.0)
    assert simulate(program, topology, 4000, slow).time_us == pytest.approx(3.1)
    reduce = classics.build("one_shot", "reduce_scatter", 4)
    local = CostModel(local_gbps=1.0)  # four sources and one result of 1000 bytes
    assert simulate(reduce, topology, 4000, local).time_us == pytest.approx(5.1)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 10**6))
def test_rates_are_max_min_fair(flows, links, seed):
    """Every flow has a bottleneck: a full link on which no other flow is faster."""
    rng = np.random.default_rng(seed)
    capacity = rng.integers(1, 20, links).astype(float)
    uses = rng.random((flows, links)) < 0.4
    uses[np.arange(flows), rng.integers(0, links, flows)] = True
    flow, link = np.nonzero(uses)
    rate = fair_rates(flow, link, capacity, flows)
    load = rate @ uses
    assert (load <= capacity * (1 + 1e-9)).all()
    for f in range(flows):
        assert any(
            uses[f, i]
            and load[i] >= capacity[i] * (1 - 1e-9)
            and rate[f] >= rate[uses[:, i]].max() - 1e-9
            for i in range(links)
        )


NAMES = ("ring5", "full4", "hypercube3", "star6", "torus2x3", "a100x2:gpus=2,nics=2", "mi300x")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_program_beats_the_optimum_and_bytes_are_conserved(data):
    topology = load(data.draw(st.sampled_from(NAMES)))
    program = data.draw(any_program(8).filter(lambda p: p.ranks == len(topology.ranks)))
    check(program)
    result = simulate(program, topology, BYTES_PER_MB)
    bound = least_us(topology, program.collective, BYTES_PER_MB, program.root)
    assert result.time_us >= bound * (1 - 1e-9)
    routes = Routes(topology)
    crossed = sum(
        op.dst.count * (len(routes.default(topology.ranks[r], topology.ranks[op.peer])) - 1)
        for r, ops in enumerate(program.operations)
        for op in ops
        if op.kind is Kind.PUT
    )
    assert sum(result.link_bytes.values()) == pytest.approx(crossed * BYTES_PER_MB / program.chunks)
    assert max(result.link_busy.values()) <= 1 + 1e-9
    for event in result.events:
        assert event.start_us <= event.left_us <= event.end_us <= result.time_us


@pytest.mark.parametrize("name", ["ring7", "torus3x4", "a100x2", "dgx2x2", "mi300xx2", "dgx1v"])
def test_default_routes_are_shortest_through_the_fewest_ranks(name):
    topology = load(name)
    graph = topology.graph()
    for src, dst in graph.edges:
        graph.edges[src, dst]["weight"] = 1 + 1000 * (dst in topology.ranks)
    routes = Routes(topology)
    away = dict(networkx.all_pairs_dijkstra_path_length(graph))
    for src in topology.ranks:
        for dst in topology.ranks:
            route = routes.default(src, dst)
            hops = list(itertools.pairwise(route))
            assert all(graph.has_edge(*hop) for hop in hops)
            assert sum(graph.edges[hop]["weight"] for hop in hops) == away[src][dst]


def test_route_rather_passes_more_switches_than_a_rank():
    hops = [("g0", "g1"), ("g1", "g2"), ("g0", "s0"), ("s0", "s1"), ("s1", "s2"), ("s2", "g2")]
    links = tuple(Link(a, b, 10, 1.0) for a, b in hops)
    topology = Topology("detour", ("g0", "g1", "g2"), ("s0", "s1", "s2"), links)
    assert Routes(topology).default("g0", "g2") == ("g0", "s0", "s1", "s2", "g2")
    assert Routes(topology).default("g0", "g1") == ("g0", "g1")


def test_boxes_are_known_from_the_builders():
    assert named("a100x2").equal_boxes() == [list(range(8)), list(range(8, 16))]
    assert named("mi300xx3").equal_boxes()[2] == list(range(16, 24))
    assert named("mi250x2").equal_boxes() == [list(range(16)), list(range(16, 32))]
    for name in ("ring8", "star8", "a100", "mi250", "a100+dgx2"):
        assert named(name).equal_boxes() is None
    assert [len(box) for box in named("a100+dgx2").boxes] == [8, 16]
    reread = from_json(to_json(named("a100x2")))
    assert reread == named("a100x2") and reread.reverse().boxes == reread.boxes


@pytest.mark.parametrize("boxes", [[["g0"]], [["g0", "g1"], ["g1"]], [["g0", "g9"]], ["g0g1"]])
def test_boxes_must_hold_every_rank_once(boxes):
    value = json.loads(to_json(named("full2"))) | {"boxes": boxes}
    with pytest.raises(TopologyError, match="bad boxes"):
        from_json(value)


def test_cutting_chunks_helps_long_paths_until_latency_wins():
    topology = load("ring8:bandwidth=10,latency=1")
    program = classics.build("ring", "broadcast", 8)
    large, result = tune_pieces(program, topology, 64 * BYTES_PER_MB)
    assert large.pieces > 8
    assert result.time_us < simulate(program, topology, 64 * BYTES_PER_MB).time_us / 4
    small, _ = tune_pieces(program, topology, 100)
    assert small.pieces <= 4
    whole, _ = tune_pieces(
        classics.build("combiner_chain", "all_reduce", 8), topology, 64 * BYTES_PER_MB
    )
    assert whole.pieces == 1
    check(whole)


def test_bad_input_gives_one_sentence():
    topology = load("ring4")
    program = classics.build("ring", "all_gather", 4)
    with pytest.raises(InvalidUsageError, match=r"for 4 ranks, but .* has 8"):
        simulate(program, load("ring8"), BYTES_PER_MB)
    with pytest.raises(InvalidUsageError, match="at least 1"):
        simulate(program, topology, 0)
    with pytest.raises(InvalidUsageError, match="fewer pieces"):
        simulate(dataclasses.replace(program, pieces=10**9), topology, BYTES_PER_MB)
    with pytest.raises(InvalidUsageError, match="port limit"):
        simulate(program, topology, BYTES_PER_MB, CostModel(ports={"nobody": 5}))
    detour = broadcast(2, [(0, 1)], routes=[("g0", "s", "g1")])
    with pytest.raises(ModelError, match="no link from g0 to s"):
        simulate(detour, line(("g0", "g1", 1, 0)), BYTES_PER_MB)
    wrong = broadcast(2, [(0, 1)], routes=[("g1", "g0")])
    with pytest.raises(ModelError, match="must lead from g0 to g1"):
        simulate(wrong, line(("g0", "g1", 1, 0), ("g1", "g0", 1, 0)), BYTES_PER_MB)
    with pytest.raises(ModelError, match="no path leads from g0 to g1"):
        simulate(broadcast(2, [(0, 1)]), line(("g1", "g0", 1, 0)), BYTES_PER_MB)


def test_protocols_trade_latency_for_bandwidth():
    slow, fast = Protocol("flags in words", 0.5, 0.0), Protocol("signal", 1.0, 3.0)
    model = CostModel(protocols=(slow, fast))
    topology = star(2, 10, 0.5)
    program = classics.build("one_shot", "broadcast", 2)
    for size, expected in ((1000, 0.2 + 1), (10**6, 100 + 1 + 3)):  # 10 GB/s is 10,000 bytes per us
        assert simulate(program, topology, size, model).time_us == pytest.approx(expected)
    measured = dataclasses.replace(topology, costs=model)
    assert simulate(program, measured, 1000).time_us == pytest.approx(1.2)
    assert from_json(to_json(measured)) == measured


def test_switches_that_multicast_and_sum():
    """Eight ranks of 8 GB/s on a switch: if the switch reduces, the textbook factor 2(N-1)/N
    becomes 1.
    """
    size = 8 * 10**6
    for ability, all_reduce, broadcast in (
        ("plain", 1.75e3, 7e3),
        ("multicast", 1e3, 1e3),
        ("reducing", 1e3, 1e3),
    ):
        topology = named(f"h100:link=8,inside={ability}")
        topology = dataclasses.replace(
            topology, links=tuple(dataclasses.replace(k, latency_us=0.0) for k in topology.links)
        )
        result = simulate(classics.build("one_shot", "broadcast", 8), topology, size)
        assert result.time_us == pytest.approx(broadcast)
        program = classics.build("two_shot", "all_reduce", 8)
        pieces = dataclasses.replace(program, pieces=64)
        time = simulate(pieces, topology, size).time_us
        if ability == "reducing":
            assert time == pytest.approx(all_reduce, rel=0.05)
            up = simulate(program, topology, size).link_bytes["g0", "s0"]
            assert up == pytest.approx(size)
        elif ability == "plain":
            assert time == pytest.approx(all_reduce, rel=0.01)
        assert time >= least_us(topology, "all_reduce", size) * (1 - 1e-9)


def test_switches_in_a_tree_sum_on_the_way():
    """A sum of four ranks below two leaf switches crosses the spine once for each leaf."""
    links = [(f"g{i}", f"l{i // 2}") for i in range(4)] + [("l0", "t"), ("l1", "t")]
    two_way = tuple(Link(*ends, 1) for a, b in links for ends in ((a, b), (b, a)))
    plain = Topology("tree", ("g0", "g1", "g2", "g3"), ("l0", "l1", "t"), two_way)
    sums = dataclasses.replace(plain, reduces=("l0", "l1", "t"))
    program = classics.build("one_shot", "reduce", 4, root=0)
    for topology, over_spine, to_root in ((plain, 2, 3), (sums, 1, 1)):
        carried = simulate(program, topology, 1000).link_bytes
        assert carried["l1", "t"] == 1000 * over_spine
        assert carried["l0", "g0"] == 1000 * to_root
