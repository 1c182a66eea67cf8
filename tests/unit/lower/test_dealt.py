"""The number of processors that get the tasks of a linear layer: all of them, or, if waiting
processors prefetch the weights of later layers, only as many as are needed to have the weights of a
whole layer in flight.
"""

from __future__ import annotations

import pytest

from ark.backend import registry
from ark.ir.dtype import bf16, fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.plan.verify import verify

# The expected number of tasks of a layer (rows of the input, k, rows of weights) on an MI300X with
# 304 compute units. 128 KB of a task's weights are in flight at once.
CASES = {
    (1, 2048, 2048): 101,  # 8 MB: 64 tasks would suffice, but the minimum is a third of all units
    (1, 2048, 3072): 101,
    (1, 8192, 2048): 256,  # 32 MB
    (1, 2048, 16384): 304,  # 64 MB are more than all hold in flight
    (1, 4096, 4096): 256,
    (1, 2056, 2048): 304,  # rows are not whole loads of eight waves, so they are not prefetched
    (2, 2048, 2048): 101,  # several rows are prefetched too
}


def tasks(machine: str, rows: int, k: int, n: int) -> list[tuple[int, ...]]:
    graph = Graph()
    x = graph.tensor((rows, k), fp32, arena="state", name="x")
    weight = graph.tensor((n, k), bf16, arena="state", name="weight")
    out = graph.tensor((rows, n), fp32, arena="state", name="y")
    graph.add("linear", [x, weight], [out], {"prologue": "none", "epilogue": "store"}, "layer")
    planned = plan(graph, registry.machine(machine))
    verify([planned])
    (phase,) = planned.phases
    return sorted(
        t.coord for listed in phase.processors for t in listed if planned.ops[t.op].kind == "linear"
    )


@pytest.mark.parametrize("case", CASES)
def test_small_layers_leave_processors_free_to_prefetch(case: tuple[int, int, int]) -> None:
    ranges = tasks("mi300x", *case)
    assert len(ranges) == CASES[case]
    ends = [0, *(end for _, end in ranges)]
    assert [begin for begin, _ in ranges] == ends[:-1] and ends[-1] == case[2]  # each row once


@pytest.mark.parametrize(("machine", "processors"), [("h100", 132), ("rx7900xtx", 48)])
def test_without_prefetching_blocks_all_processors_have_a_task(
    machine: str, processors: int
) -> None:
    assert len(tasks(machine, 1, 2048, 2048)) == processors
