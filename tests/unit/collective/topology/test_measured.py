"""Measured topologies: latency and bandwidth fitted to times, links computed from measured pairs of
ranks, costs of operations, and the contents of the file.
"""

import itertools

import pytest

from ark.cli import main
from ark.collective import classics
from ark.collective.forestcoll import optimal
from ark.collective.simulate import Routes, simulate
from ark.collective.topology import TYPICAL, from_json, load, named, to_json
from ark.collective.topology.measured import Line, Pair, fit, measured


def times(alpha, gbps, sizes):
    return [alpha + n / gbps / 1e3 for n in sizes]


def test_line_is_found_again():
    sizes = (64, 4096, 1 << 20)
    line = fit(sizes, times(3.5, 12.5, sizes))
    assert (line.alpha_us, line.gbps) == pytest.approx((3.5, 12.5))
    flat = fit(sizes, [2.0, 2.0, 2.0])  # all latency: at most twice the largest bandwidth seen
    assert flat.alpha_us == pytest.approx(2, rel=1e-6)
    assert flat.gbps == pytest.approx(2 * (1 << 20) / 2.0 / 1e3)
    steep = fit(sizes, [0.001, 1.0, 300.0])  # a negative latency is set to 0
    assert steep.alpha_us == 0 and 3 < steep.gbps < 70


def test_pairs_become_links_and_costs():
    """In a star of three, g2's port is half as fast. The ports of the others keep their
    bandwidth.
    """
    topology = named("star3")
    routes = Routes(topology)
    ways = {
        (a, b): routes.default(f"g{a}", f"g{b}") for a, b in itertools.permutations(range(3), 2)
    }
    pairs = []
    for a, b in itertools.combinations(range(3), 2):
        rate = 10.0 if b == 2 else 20.0
        lines = {"packet": Line(2.0, rate / 2), "threads": Line(5.0, rate)}
        pairs.append(Pair(a, b, lines, 0.25, None if b == 2 else 300.0))
    result = measured(topology, pairs, ways)
    assert {link.src: link.bandwidth for link in result.links if link.dst == "s0"} == {
        "g0": 20,
        "g1": 20,
        "g2": 10,
    }
    assert {link.latency_us for link in result.links} == {1.0}
    assert result.costs.put_overhead_us == 0.25 and result.costs.local_gbps == 300
    assert [(p.name, p.share, p.latency_us) for p in result.costs.protocols] == [
        ("packet", 0.5, 0.0),
        ("threads", 1.0, 3.0),
    ]
    assert from_json(to_json(result)) == result
    # A put sends packets (data with flags), or threads copy it. The simulated time of a small put
    # is the one measured for packets, that of a large put the one measured for copying threads.
    program = classics.build("one_shot", "broadcast", 3)
    small, large = (simulate(program, result, size).time_us for size in (100, 1 << 24))
    assert small == pytest.approx(2.0 + 0.25 + 100 * 2 / 10 / 1e3, rel=0.02)
    copy = 2 * (1 << 24) / 300 / 1e3  # the root's copy into its own output
    assert large == pytest.approx(copy + 5.0 + 0.25 + (1 << 24) / 10 / 1e3, rel=1e-3)


def test_links_that_differ_by_less_than_repeats_do_are_equal():
    """Links whose measured bandwidths differ by less than repeated measurements do count as equal.
    Here five of six links are within 15% of each other and get one bandwidth, so that few trees
    suffice; the sixth has a third of it.
    """
    rates = (338.2, 361.9, 350.0, 345.1, 359.7, 112.4)
    lines = [{"threads": Line(4.3 + 0.01 * i, rate)} for i, rate in enumerate(rates)]
    every = itertools.combinations(range(4), 2)
    pairs = [Pair(*pair, line, 1.0, None) for pair, line in zip(every, lines, strict=True)]
    ways = {(a, b): (f"g{a}", f"g{b}") for a, b in itertools.permutations(range(4), 2)}
    result = measured(named("full4"), pairs, ways)
    assert {link.bandwidth for link in result.links} == {350, 110}
    assert {link.latency_us for link in result.links} == {4.325}
    equal = measured(
        named("full4"), [Pair(p.one, p.other, lines[0], 1.0, None) for p in pairs], ways
    )
    assert optimal(equal).k == 1


def test_small_sizes_rank_by_latency(capsys, tmp_path):
    """With typical costs one_shot is faster for small sizes and the ring for large ones; small puts
    are sent with flags in the data (packets).
    """
    h100 = load("h100")
    ring, direct = (classics.build(name, "all_reduce", 8) for name in ("ring", "one_shot"))
    ratio = {
        size: simulate(ring, h100, size, TYPICAL).time_us
        / simulate(direct, h100, size, TYPICAL).time_us
        for size in (1 << 10, 1 << 30)
    }
    assert ratio[1 << 10] > 2 and ratio[1 << 30] < 1
    words = ["topo", "simulate", "h100", "--collective", "all_reduce", "--algorithm", "one_shot"]
    for costs in ("none", "typical"):
        assert main([*words, "--size", "1K", "--costs", costs]) == 0
    printed = capsys.readouterr().out
    assert printed.count("time, us") == 2


def test_unmeasurable_links_are_reported(capsys):
    assert main(["topo", "measure", "ring4", "--ranks", "3"]) == 2
    assert "ring4 has 4 ranks, and --ranks says 3" in capsys.readouterr().err
