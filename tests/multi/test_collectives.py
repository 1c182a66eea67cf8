"""Collectives by ForestColl's trees and by classic algorithms: lowered to tasks, verified together,
run on ranks as threads and as processes, and with faults.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.collective import topology
from ark.collective.programs import Collective, CollectiveProgram, ProgramBuilder
from ark.collective.programs.types import Kind, Span
from ark.collective.programs.values import flow
from ark.collective.synthesis import synthesize
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan as make_plan
from ark.plan.types import Plan
from ark.plan.verify import verify
from tests.cases.collectives import build, check_collectives, devices, keep, names, short_suite
from tests.slow import slow
from tests.unit.plan.oracle import tasks
from tests.unit.plan.shapes import replace_task


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("cpu", 2),
        ("cpu", 4),
        pytest.param("cpu", 8, marks=slow),
        ("cuda", 2),
        ("cuda", 4),
        ("cuda", 8),
        pytest.param("rocm", 2, marks=slow),
    ],
)
def test_every_collective_gives_the_right_result(name: str, world: int) -> None:
    with devices(name, world) as (opened, machine):
        check_collectives(name, world, opened, machine)


@slow
@pytest.mark.timeout(1800)
def test_every_collective_on_four_emulated_devices() -> None:
    with devices("rocm", 4) as (opened, machine):
        check_collectives("rocm", 4, opened, machine, short_suite)


def loop_in_processes() -> None:
    """The function that each of two processes runs: one launch of a kernel that runs several times,
    each time on other data.
    """
    ark.init(backend="cpu")
    rank = ark.Model.get_rank()
    x = ark.tensor([5, 41])
    total = ark.all_reduce(x, rank, 2, algorithm="forestcoll")
    gathered = ark.all_gather(total * (rank + 1.0), rank, 2, algorithm="ring")
    with ark.Runtime() as runtime:
        runtime.launch()
        for step in range(4):
            x.from_numpy(np.full((5, 41), 10.0 * step + rank))
            runtime.barrier()
            runtime.run(2)
            want = 20.0 * step + 1
            assert (total.to_numpy() == want).all(), total.to_numpy()
            assert (gathered.to_numpy() == np.repeat([want, 2 * want], 5)[:, None]).all()
            runtime.barrier()


def test_ranks_as_processes() -> None:
    assert ark.launch(2, loop_in_processes) == 0


@cache
def forest_plans(world: int, network: str, engine: str) -> list[Plan]:
    """Returns plans of an all-reduce and an all-gather by trees, with many tasks for each
    processor. Iterations begin in lockstep; test_pipeline covers the waits between iterations.
    """

    def body(rank: int) -> None:
        x = ark.mul(ark.tensor([600], name="x"), 2.0)
        how = {"algorithm": "forestcoll", "topology": network, "engine": engine}
        keep(ark.all_reduce(x, rank, world, **how), "sum")
        keep(ark.all_gather(x, rank, world, **how), "all")

    plans = build(world, body, registry.machine("cpu-64"), lockstep=True)
    verify(plans)
    return plans


def refused(plans: list[Plan], rank: int, changed: Plan) -> bool:
    try:
        verify([changed if p.rank == rank else p for p in plans])
    except ark.PlanError as error:
        return str(error).startswith("the plan is refused: ")
    return False


def breaks(plan: Plan) -> Iterator[Plan]:
    """Yields variants of the plan, each with one fault: a put to a wrong rank, or one wait or
    signal of a peer dropped.
    """
    for buffer in plan.buffers:
        for wrong in range(plan.world_size):
            if buffer.rank not in (plan.rank, wrong):
                buffers = list(plan.buffers)
                buffers[buffer.id] = dataclasses.replace(buffer, rank=wrong)
                yield dataclasses.replace(plan, buffers=tuple(buffers))
    for place, task in tasks(plan).items():
        for counter, threshold in task.waits:
            if plan.counters[counter].system:
                kept = tuple(w for w in task.waits if w != (counter, threshold))
                yield replace_task(plan, place, waits=kept)
        for counter in task.signals:
            if plan.counters[counter].rank != plan.rank:
                kept = tuple(s for s in task.signals if s != counter)
                yield replace_task(plan, place, signals=kept)


@pytest.mark.parametrize(
    ("world", "network", "every", "engine"),
    [
        *((2, "full2", 1, engine) for engine in ("packet", "threads")),
        *((4, "ring4", 1, engine) for engine in ("packet", "threads")),
        (8, "hypercube3", 23, "packet"),
        pytest.param(8, "hypercube3", 23, "threads", marks=slow),
    ],
)
def test_every_broken_put_wait_and_signal_is_refused(
    world: int, network: str, every: int, engine: str
) -> None:
    """Every single fault (see `breaks`) in the plan of rank 1 is refused by the verifier; on 8
    ranks only some are tried. Waits are not dropped if data travel as packets, which need none.
    """
    plans = forest_plans(world, network, engine)
    broken = list(breaks(plans[1]))[::every]
    assert len(broken) >= 4
    for number, changed in enumerate(broken):
        assert refused(plans, 1, changed), number


def test_no_value_is_written_twice_or_without_a_reader() -> None:
    for world in (2, 3, 8):
        for name in names(world, "all_reduce"):
            program = synthesize(topology.full_mesh(world), "all_reduce", name)
            values = flow(program).values
            used = {source for value in values.values() for source in value.sources}
            final = {value.number for value in flow(program).final.values()}
            assert set(values) == used | final
            for value in values.values():
                assert all(values[s].rank == value.writer for s in value.sources)
                assert all(values[s].part == value.part for s in value.sources)


def test_unneeded_parts_have_no_task() -> None:
    builder = ProgramBuilder("idle", "broadcast", ranks=2, chunks=1, root=0)
    spare = builder.scratch(1)
    builder.copy(0, Span("in", 0), Span("out", 0))
    builder.put(0, 1, Span("in", 0), Span(spare, 0))
    builder.put(0, 1, Span("in", 0), Span("out", 0))

    def body(rank: int) -> None:
        x = ark.mul(ark.tensor([9]), 1.0)
        keep(ark.broadcast(x, rank, 2, algorithm=builder.build()), "y")

    plans = build(2, body)
    verify(plans)
    puts = [b for b in plans[0].buffers if b.rank == 1]
    assert len(puts) == 1


def test_more_shares_than_a_task_supports_are_added_in_steps() -> None:
    program = synthesize(topology.full_mesh(16), "all_reduce", "two_shot")
    assert max(len(op.srcs) for op in program.operations[0] if op.kind is Kind.REDUCE) == 16

    def body(rank: int) -> None:
        keep(ark.all_reduce(ark.mul(ark.tensor([40]), 1.0), rank, 16, algorithm=program), "y")

    verify(build(16, body))


def test_one_rank_copies() -> None:
    model = Model(0, 1)
    with use_model(model):
        x = ark.tensor([6])
        assert ark.all_gather(x, 0, 1).shape() == [6]
        ark.all_reduce(x, 0, 1, algorithm="forestcoll")
    verify([make_plan(model.graph, registry.machine("cpu-1"))])


BAD: dict[str, tuple[Callable[[ark.Tensor], object], type, str]] = {
    "unknown algorithm": (
        lambda x: ark.all_reduce(x, 0, 4, algorithm="gossip"),
        ark.InvalidUsageError,
        "'gossip'.*choose one of forestcoll, taccl, ring",
    ),
    "algorithm of another collective": (
        lambda x: ark.all_gather(x, 0, 4, algorithm="two_shot"),
        ark.InvalidUsageError,
        "'two_shot' for all_gather",
    ),
    "topology of other ranks": (
        lambda x: ark.all_reduce(x, 0, 4, algorithm="ring", topology="ring8"),
        ark.InvalidUsageError,
        "ring8, which has 8",
    ),
    "no topology": (
        lambda x: ark.all_reduce(x, 0, 4, algorithm="ring", topology="moebius4"),
        ark.InvalidUsageError,
        "moebius4",
    ),
    "program of other ranks": (
        lambda x: ark.all_gather(x, 0, 4, algorithm=synthesize("ring2", "all_gather")),
        ark.InvalidUsageError,
        "2 ranks",
    ),
    "program of whole tensors": (
        lambda x: ark.all_reduce(
            x, 0, 4, algorithm=synthesize("ring4", "all_reduce", "adasum_tree", reduction="adasum")
        ),
        ark.UnsupportedError,
        "reduces by adasum",
    ),
    "program that is wrong": (
        lambda x: ark.all_gather(
            x,
            0,
            4,
            algorithm=CollectiveProgram("empty", Collective.ALL_GATHER, 4, 4, (), ((),) * 4),
        ),
        ark.PlanError,
        "program empty is refused",
    ),
    "rank of another model": (
        lambda x: ark.all_gather(x, 1, 4),
        ark.ModelError,
        "rank 1 of 4",
    ),
    "root": (lambda x: ark.broadcast(x, 0, 4, root=4), ark.InvalidUsageError, "root is 4"),
    "rows": (lambda x: ark.reduce_scatter(x, 0, 4), ark.ModelError, "multiple"),
    "type": (
        lambda x: ark.all_reduce(ark.cast(x, ark.bool), 0, 4, algorithm="ring"),
        ark.ModelError,
        "the input is bool",
    ),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_calls(case: str) -> None:
    call, kind, match = BAD[case]
    with use_model(Model(0, 4)), pytest.raises(kind, match=match):
        call(ark.tensor([6, 4]))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.graph.python.max_flow", None)
    network = topology.named("ring6:bandwidth=7")  # in no cache
    with (
        use_model(Model(0, 6)),
        pytest.raises(ark.SystemError, match=r"ortools.*pip install 'ark-gpu\[comm\]'"),
    ):
        ark.all_reduce(ark.tensor([8]), 0, 6, algorithm="forestcoll", topology=network)
