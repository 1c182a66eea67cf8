"""TACCL: the default sketch on many kinds of network, detours, and the objective of its optimum."""

import pytest

from ark.collective.bounds import least_us
from ark.collective.programs import check
from ark.collective.simulate import tune_pieces
from ark.collective.taccl import Sketch, synthesize_taccl
from ark.collective.topology import named
from tests.cases.taccl import prove
from tests.slow import slow
from tests.unit.collective.networks import random_eulerian

BYTES_PER_MIB = 1 << 20


@pytest.mark.parametrize("seed", range(0, 60, 20))
def test_default_sketch_joins_all_ranks_of_mixed_networks(seed):
    for each in range(seed, seed + 20):
        topology = random_eulerian(each)
        if len(topology.ranks) < 2:
            continue
        program = synthesize_taccl(topology, None, "all_gather", 5, size_bytes=BYTES_PER_MIB)
        check(program.program)


@pytest.mark.parametrize("inside", ["switch", pytest.param("none", marks=slow)])
def test_detours_where_shortest_paths_share_a_thin_link(inside):
    topology = named("ndv2x4")  # eight ranks of a box share one NIC
    every = {"strategy": "switch", "switches": [list(range(8))]}
    raw = {
        "nnodes": 4,
        "intranode_sketch": every if inside == "switch" else {"strategy": "none"},
        "internode_sketch": {"strategy": "relay", "internode_conn": "fully-connected"},
        "symmetry_offsets": [[8, 32]],
    }
    program = synthesize_taccl(topology, Sketch.from_json(raw), "all_gather", 60, 1 << 30)
    assert "detours" in program.paths
    assert program.routing_us < 1.1 * least_us(topology, "all_gather", 1 << 30)  # else 8 times
    prove(program.program, topology)


def test_optimality_names_its_objective():
    program = synthesize_taccl(named("ring4"), None, "all_gather", 10)
    assert program.optimal and program.paths == "paths at most 1 longer than the shortest"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("mi250", marks=slow),
        pytest.param("mi250x2", marks=slow),
        "dgx1v",
        pytest.param("a100x2+h100x2", marks=slow),
        "mesh2x3",
    ],
)
def test_default_sketch_comes_near_the_bound(name):
    topology = named(name)
    program = synthesize_taccl(topology, None, "all_gather", 10, size_bytes=256 * BYTES_PER_MIB)
    _, result = tune_pieces(program.program, topology, 256 * BYTES_PER_MIB)
    assert result.time_us * 0.9 < least_us(topology, "all_gather", 256 * BYTES_PER_MIB)
