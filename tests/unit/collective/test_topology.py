"""Topologies: builders compared with known counts of the machines, JSON, names, faults,
detection.
"""

import json
from fractions import Fraction

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ark.cli import main
from ark.collective import packages
from ark.collective.forestcoll import optimal
from ark.collective.programs import check
from ark.collective.programs import from_json as from_json_program
from ark.collective.topology import (
    GRAMMAR,
    Link,
    Topology,
    TopologyError,
    from_json,
    full_mesh,
    hypercube,
    load,
    mesh,
    named,
    nvlink_boxes,
    ring,
    star,
    to_json,
    topology_of_boxes,
    torus,
)
from ark.errors import InvalidUsageError, SystemError
from tests.slow import examples


def duplex_json(*pairs, bandwidth=1):
    nodes = sorted({node for pair in pairs for node in pair})
    return {
        "nodes": [{"id": node, "kind": "switch" if node[0] == "s" else "rank"} for node in nodes],
        "links": [
            {"src": src, "dst": dst, "bandwidth": bandwidth, "duplex": True} for src, dst in pairs
        ],
    }


def out_bandwidth(topology, node):
    return sum(link.bandwidth for link in topology.links if link.src == node)


@pytest.mark.parametrize(
    "name, ranks, switches, out_of_a_rank",
    [
        ("a100", 8, 1, 300),
        ("a100x2", 16, 3, 325),
        ("h100x4", 32, 5, 500),
        ("h200x2", 16, 3, 500),
        ("b200x2", 16, 3, 950),
        ("dgx1v", 8, 0, 150),
        ("dgx2", 16, 1, 150),
        ("dgx2x2", 32, 19, Fraction(325, 2)),
        ("ndv2x2", 16, 3, Fraction(325, 2)),
        ("mi250", 16, 0, 350),
        ("mi300x", 8, 0, 448),
        ("mi300xx2", 16, 1, 498),
        ("a100x2:gpus=4,nics=2,nic=25/2", 8, 7, Fraction(625, 2)),
        ("a100x4:fabric=rail", 32, 12, 325),
        ("a100x2+h100x2", 32, 5, 325),
        ("ring8", 8, 0, 2),
        ("hypercube3", 8, 0, 3),
        ("torus4x4", 16, 0, 4),
        ("torus3x3x3:bandwidth=5/2", 27, 0, 15),
        ("full5", 5, 0, 4),
        ("star6:bandwidth=450", 6, 1, 450),
    ],
)
def test_named_topologies(name, ranks, switches, out_of_a_rank):
    topology = named(name)
    topology.validate()
    assert (len(topology.ranks), len(topology.switches)) == (ranks, switches)
    assert out_bandwidth(topology, topology.ranks[0]) == out_of_a_rank


def test_dgx1v_is_a_cube_mesh_with_six_links_a_rank():
    topology = named("dgx1v:link=1")
    assert {out_bandwidth(topology, rank) for rank in topology.ranks} == {6}
    assert networkx.diameter(topology.graph()) == 2


def test_every_mi250_die_has_seven_links_of_50_gb():
    topology = named("mi250:link=1")
    assert {out_bandwidth(topology, rank) for rank in topology.ranks} == {7}


@pytest.mark.parametrize(
    "network, reference",
    [
        (ring(7), networkx.cycle_graph(7)),
        (full_mesh(6), networkx.complete_graph(6)),
        (star(5), networkx.star_graph(5)),
        (hypercube(4), networkx.hypercube_graph(4)),
        (mesh((3, 4)), networkx.grid_2d_graph(3, 4)),
        (torus((3, 5)), networkx.grid_2d_graph(3, 5, periodic=True)),
    ],
)
def test_shapes_equal_those_of_networkx(network, reference):
    assert networkx.is_isomorphic(network.graph().to_undirected(), reference)


def test_leaf_spine_uplink_is_divided_by_the_oversubscription():
    topology = named("a100x2:fabric=leafspine,oversubscription=4")
    assert topology.capacities()["leaf0", "spine"] == 50


def test_rail_joins_the_same_nic_of_all_boxes():
    graph = named("h100x3:fabric=rail").graph()
    assert set(graph.successors("rail5")) == {"g5", "g13", "g21"}


def test_parallel_links_are_summed_and_keep_the_least_latency():
    links = (Link("a", "b", Fraction(1), 3.0), Link("a", "b", Fraction(1, 3), 2.0))
    graph = Topology("t", ("a", "b"), (), links).graph()
    assert graph.edges["a", "b"] == {"bandwidth": Fraction(4, 3), "latency_us": 2.0}


def test_reverse_turns_every_link_round():
    topology = Topology("t", ("a", "b"), (), (Link("a", "b", Fraction(2), 1.0),))
    assert topology.reverse().links == (Link("b", "a", Fraction(2), 1.0),)
    assert topology.reverse().reverse() == topology


topologies = st.integers(2, 6).flatmap(
    lambda count: st.builds(
        lambda name, switches, links: Topology(
            name,
            tuple(f"r{index}" for index in range(count - switches)),
            tuple(f"r{index}" for index in range(count - switches, count)),
            tuple(Link(f"r{a}", f"r{b}", w, lat) for (a, b), w, lat in links),
        ),
        st.text(max_size=8),
        st.integers(0, count - 1),
        st.lists(
            st.tuples(
                st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(
                    lambda pair: pair[0] != pair[1]
                ),
                st.fractions(min_value=Fraction(1, 99), max_value=1000, max_denominator=99),
                st.floats(0, 1e6),
            ),
            max_size=12,
        ),
    )
)


@settings(max_examples=examples(100), deadline=None)
@given(topologies)
def test_json_round_trip(topology):
    assert from_json(to_json(topology)) == topology
    assert from_json(json.loads(to_json(topology))) == topology


@pytest.mark.parametrize("name", ["a100x2", "dgx2x2:nic=25/2", "torus2x3:bandwidth=7/3"])
def test_json_of_duplex_links_round_trips_on_half_the_lines(name):
    topology = named(name)
    assert from_json(to_json(topology)) == topology
    assert to_json(topology).count('"src"') == len(topology.links) // 2


@settings(max_examples=examples(200), deadline=None)
@given(st.text(max_size=40) | st.from_regex(r"[a-z]{2,6}[0-9x+:=,]{0,9}", fullmatch=True))
def test_any_name_gives_a_topology_or_one_clear_sentence(name):
    try:
        named(name).validate()
    except (InvalidUsageError, TopologyError, SystemError) as error:
        assert len(str(error)) > 10


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.fixed_dictionaries(
        {"nodes": st.lists(json_values, max_size=3), "links": st.lists(json_values, max_size=3)}
    )
    | json_values.filter(lambda value: isinstance(value, dict))
)
def test_any_json_gives_a_topology_or_a_named_fault(value):
    try:
        from_json(value)
    except TopologyError as error:
        assert str(error).startswith(error.fault)


def with_link(**changes):
    value = duplex_json(("a", "b"))
    value["links"][0].update(changes)
    return value


@pytest.mark.parametrize(
    "value, fault",
    [
        ("{", "not JSON"),
        ("[" * 100_000, "bad field"),
        ([], "bad field"),
        ({"links": []}, "missing field"),
        ({"nodes": [], "links": [], "extra": 1}, "unknown field"),
        ({"nodes": [], "links": []}, "no ranks"),
        ({"nodes": [{"id": "a", "kind": "gpu"}], "links": []}, "unknown kind"),
        ({"nodes": [{"id": "a", "kind": "rank"}] * 2, "links": []}, "duplicate node"),
        (with_link(src="z"), "unknown node"),
        (with_link(src="b"), "self link"),
        (with_link(bandwidth=0), "zero capacity"),
        (with_link(bandwidth=-3), "negative bandwidth"),
        (with_link(bandwidth="-1/2"), "negative bandwidth"),
        (with_link(bandwidth=1.5), "bad bandwidth"),
        (with_link(bandwidth=10**40), "bad bandwidth"),
        (with_link(bandwidth=float("inf")), "bad bandwidth"),
        (with_link(bandwidth=True), "bad bandwidth"),
        (with_link(bandwidth="1/0"), "bad bandwidth"),
        (with_link(bandwidth="fast"), "bad bandwidth"),
        (with_link(latency_us=-1), "bad latency"),
        (with_link(latency_us=float("nan")), "bad latency"),
        (with_link(speed=3), "unknown field"),
        (with_link(duplex=1), "bad field"),
        (with_link(duplex=False), "disconnected"),
        (duplex_json(("a", "b"), ("c", "d")), "disconnected"),
    ],
)
def test_faults_are_named(value, fault):
    with pytest.raises(TopologyError) as caught:
        from_json(value).validate()
    assert caught.value.fault == fault
    assert str(caught.value).startswith(f"{fault}: ")
    assert "\n" not in str(caught.value)


def test_error_for_a_float_bandwidth_gives_the_fraction():
    for make in (lambda: Link("a", "b", 12.5), lambda: from_json(with_link(bandwidth=12.5))):
        with pytest.raises(TopologyError, match=r'has 12[.]5; bandwidths are exact, write "25/2"'):
            make()
    assert Link("a", "b", 12) == Link("a", "b", Fraction(12))


@pytest.mark.parametrize("huge", [10**10, 10**40, 10**5000, Fraction(1, 10**40)], ids=range(4))
def test_bandwidth_beyond_floats_is_refused(huge):
    with pytest.raises(TopologyError, match=r"bad bandwidth: link a -> b has .* expected"):
        Link("a", "b", huge)


def test_file_without_a_name_is_called_by_the_files(tmp_path):
    (tmp_path / "fabric.json").write_text(json.dumps(duplex_json(("a", "b"))))
    assert load(str(tmp_path / "fabric.json")).name == "fabric"


def test_network_may_send_less_than_it_takes():
    value = duplex_json(("a", "s0"), ("b", "s0"))
    value["links"].append({"src": "a", "dst": "s0", "bandwidth": "1/3"})
    from_json(value).validate()


def test_switch_without_exit():
    value = duplex_json(("a", "b"), ("a", "s0"))
    value["links"][1]["duplex"] = False
    with pytest.raises(TopologyError, match="switch without exit: links enter switch s0"):
        from_json(value).validate()


@pytest.mark.parametrize(
    "name",
    [
        "",
        "nosuch",
        "a100x0",
        "a100x2:fabric=mesh",
        "a100x2:oversubscription=2",
        "a100x2:fabric=leafspine,oversubscription=1/2",
        "a100x2:nics=3",
        "a100x2:nic=fast",
        "a100x2:speed=3",
        "a100x2:gpus=2,gpus=2",
        "mi300x:gpus=4",
        "a100x99999",
        "ring1",
        "ring4x4",
        "hypercube40",
        "torus0x4",
        "torus4x4:latency=soon",
        "missing.json",
    ],
)
def test_bad_names_are_refused(name):
    with pytest.raises((InvalidUsageError, TopologyError)) as caught:
        load(name)
    assert "\n" not in str(caught.value)


def test_grammar_lists_every_box():
    for kind in ("a100", "h100", "h200", "b200", "dgx1v", "dgx2", "ndv2", "mi250", "mi300x"):
        assert kind in GRAMMAR
        nvlink_boxes(kind, 2).validate()


def test_no_boxes_are_no_topology():
    with pytest.raises(InvalidUsageError):
        topology_of_boxes([])


def test_load_reads_a_file_and_names_it_in_errors(tmp_path):
    path = tmp_path / "pair.json"
    path.write_text(json.dumps(duplex_json(("a", "b"), bandwidth="3/2")))
    assert load(str(path)).capacities()["a", "b"] == Fraction(3, 2)
    path.write_text(json.dumps(duplex_json(("a", "b"), bandwidth=0)))
    with pytest.raises(TopologyError, match=r"zero capacity: in .*pair\.json, link a -> b"):
        load(str(path))


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(packages.importlib, "import_module", _no_module)
    with pytest.raises(SystemError, match=r"needs the package networkx.*ark-gpu\[comm\]"):
        ring(4).graph()


def _no_module(name):
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_group_of_ranks_takes_part_and_the_others_relay():
    six = named("ring6")
    group = six.subgroup([0, 3, 1])
    assert group.ranks == ("g0", "g3", "g1") and group.switches == ("g2", "g4", "g5")
    assert group.links == six.links
    # Removed ranks still forward data (they became switches), so g3 is connected to the others in
    # both directions around the ring.
    assert optimal(group, roots={"g3": 1}).inv_x == Fraction(1, 2)
    with pytest.raises(TopologyError, match="disconnected"):
        six.subgroup([0, 3], relay=False).validate()
    alone = named("a100x2").subgroup(range(8), relay=False)
    assert alone.boxes == (tuple(f"g{i}" for i in range(8)),)
    # The NICs of the removed ranks' box (25 GB/s, beside 300 GB/s inside of the box) still connect
    # to the network.
    assert optimal(alone).algbw == optimal(named("a100")).algbw * Fraction(325, 300)
    for wrong in ([0, 0], [6], [-1]):
        with pytest.raises(InvalidUsageError, match="different ranks from 0 to 5"):
            six.subgroup(wrong)


def test_programs_of_a_group_are_right(capsys):
    words = ["topo", "synthesize", "dgx1v", "--group", "0,3-5,7", "--collective", "all_reduce"]
    assert main([*words, "--format", "json"]) == 0
    program = from_json_program(capsys.readouterr().out)
    check(program)
    assert program.ranks == 5
    assert main(["topo", "show", "ring4", "--group", "a"]) == 2
    assert "not a list of ranks such as 0-3,8" in capsys.readouterr().err
