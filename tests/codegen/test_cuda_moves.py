"""The task lists of moving warps, which copy and add data between ranks while other warps multiply
(kernel variant `matrix`). Tests the contents of the lists, that products do not wait for the tasks
in them, and that the kernel compiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.errors import PlanError
from ark.ir.dtype import bf16
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.machine.variant import MOVE
from ark.ops.communication.collectives import choose_program
from ark.plan.serialize import from_json, machine_of, to_json
from ark.plan.types import Plan, Task
from ark.plan.verify import verify

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, machines

from tests import kept

H100 = machines.MODELS["h100"]
ROWS, DEPTH, TILES = 4096, 512, 512  # of 128 x 256, in four rounds of 128


def graph_of(rank: int, collective: str) -> Graph:
    """Returns the graph of one rank of two: a product, its all-reduce or reduce-scatter, and the
    ops that follow.
    """
    graph = Graph(rank, 2)
    x = graph.tensor((ROWS, DEPTH), bf16, arena="state", name="x")
    w = graph.tensor((ROWS, DEPTH), bf16, arena="state", name="w")
    share = graph.tensor((ROWS, ROWS), bf16, name="made")
    rows = ROWS // (1 if collective == "all_reduce" else 2)
    y, z = (graph.tensor((rows, ROWS), bf16, name=name) for name in "yz")
    graph.add("matmul", [x, w], [share], {"transpose_a": False, "transpose_b": True}, "product")
    if collective == "all_reduce":
        graph.add("all_reduce", [share], [y], {"packet": False}, "sum")
    else:
        how = choose_program("reduce_scatter", 2, "one_shot", None, None, "sum")
        graph.add("collective", [share], [y], {"program": how, "engine": "auto"}, "sum")
    graph.add("relu", [y], [z], {}, "after")
    return graph


def plans_of(collective: str) -> list[Plan]:
    plans = [plan(graph_of(rank, collective), H100, {"overlap": True}) for rank in range(2)]
    verify(plans)
    return plans


def tasks(planned: Plan, name: str) -> Iterator[tuple[int, Task]]:
    """The tasks of ops whose names contain the given text, each with the number of the task list
    that contains it.
    """
    for lane, listed in enumerate(planned.phases[0].processors):
        yield from ((lane, task) for task in listed if name in planned.ops[task.op].name)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_moving_warps_send_and_add_all_rounds_but_the_last(collective: str) -> None:
    planned = plans_of(collective)[0]
    assert machine_of(planned, 0).variant.role(MOVE) == 3
    assert len(planned.phases[0].processors) == 2 * planned.processors == 264
    puts = [lane for lane, _ in tasks(planned, ".put+1")]
    assert puts and min(puts) >= planned.processors
    sums = [lane < planned.processors for lane, _ in tasks(planned, ".0.sum")]
    assert 2 * sum(sums) == len(sums)  # one of two rounds of tiles, the last
    kinds = {planned.ops[t.op].kind for ts in planned.phases[0].processors[132:] for t in ts}
    assert kinds == {"combine"}
    assert from_json(to_json(planned)) == planned


def test_products_do_not_wait_for_peers() -> None:
    """Products wait neither for data from peers nor for memory that a copy still reads."""
    planned = plans_of("all_reduce")[0]
    products = [t for _, t in tasks(planned, "") if planned.ops[t.op].kind == "matmul"]
    assert len(products) == TILES
    assert not any(task.waits for task in products)


def test_its_kernel_compiles_without_waits_between_instructions() -> None:
    planned = plans_of("all_reduce")[0]
    machine = machine_of(planned, 0)
    emitted = write(planned, machine, backend.dialect("sm_90a"))
    binary = kept.binary(backend, emitted.source, Target("sm_90a", machine.threads))
    assert "serialized" not in binary.log
    assert emitted.source.text.count("_move(const ArkTask& t)") >= 2


def test_task_without_a_body_for_moving_warps_is_refused() -> None:
    planned = plans_of("all_reduce")[0]
    dialect = backend.dialect("sm_90a")
    none = dataclasses.replace(dialect, bodies=tuple(b for b in dialect.bodies if not b.moves))
    with pytest.raises(PlanError, match="is assigned to moving warps"):
        write(planned, machine_of(planned, 0), none)


def test_without_rounds_of_products_moving_warps_have_no_list() -> None:
    graph = Graph(0, 1)
    x = graph.tensor((ROWS, DEPTH), bf16, arena="state", name="x")
    y = graph.tensor((ROWS, ROWS), bf16, arena="state", name="y")
    graph.add("matmul", [x, x], [y], {"transpose_a": False, "transpose_b": True}, "product")
    planned = plan(graph, H100, {"overlap": True})
    assert planned.variant == "matrix" and len(planned.phases[0].processors) == planned.processors
