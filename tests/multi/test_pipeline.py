"""Ranks that do but send and receive begin their iterations by themselves: a pipeline has several
micro-batches in flight, and what a stage has not yet read is not overwritten.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.errors import PlanError
from ark.frontend.model import Model, use_model
from ark.lower.ranks import plan_ranks
from ark.plan.types import ITERATION_BARRIER, Plan, Task
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.ranks import ThreadRanks, run_ranks
from tests.unit.plan.oracle import tasks
from tests.unit.plan.shapes import replace_task

WIDTH, ITERATIONS = 3000, 40
Place = tuple[int, int, int]


def stage(rank: int, slow: int, world: int) -> None:
    """Rank 0 counts micro-batches and sends their number in every element; each rank adds up what
    comes and passes it on. A stage of number `slow` has more to do.
    """
    begun = ark.tensor([8], name="begun")
    ark.add(begun, 1.0, output=begun)
    batch = ark.tensor([WIDTH], name="batch")
    if rank == 0:
        ark.add(batch, 1.0, output=batch)
    else:
        batch = ark.recv(batch, rank - 1, tag=0)
    total = ark.tensor([WIDTH], name="total")
    if rank == slow:
        work = ark.mul(ark.matmul(ark.tensor([300, 300]), ark.tensor([300, 300])), 0.0)
        row = ark.reduce_sum(ark.reduce_sum(work, axis=0), axis=1)
        ark.add(total, ark.add(batch, ark.reshape(row, (1,))), output=total)
    else:
        ark.add(total, batch, output=total)
    if rank + 1 < world:
        ark.send(batch, rank + 1, tag=0)


def build(world: int, slow: int, machine: str = "cpu-1") -> list[Plan]:
    graphs = []
    for rank in range(world):
        model = Model(rank, world)
        with use_model(model):
            stage(rank, slow, world)
        graphs.append(model.graph)
    return list(plan_ranks(graphs, registry.machine(machine)))


def run(plans: list[Plan], iterations: int, trace: int = 0) -> list[tuple[np.ndarray, list]]:
    backend, _ = registry.choose("cpu")

    def work(ranks: ThreadRanks) -> tuple[np.ndarray, list]:
        plan = plans[ranks.rank]
        with Executor(
            plan, backend, backend.open(0), ranks=ranks, budget_s=30.0, trace_records=trace
        ) as executor:
            for name in ("batch", "total"):
                executor.write(name, np.zeros(WIDTH, np.float32))
            executor.start(iterations).wait(120.0)
            found = executor.read("total"), executor.trace() if trace else []
            ranks.barrier()
            return found

    return run_ranks(len(plans), work)


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize("machine", ["cpu-1", "cpu-2"])
def test_no_stage_sees_a_micro_batch_twice_or_misses_one(slow: int, machine: str) -> None:
    """Each element of each stage adds up 1 to 40, whoever is slow."""
    plans = build(3, slow, machine)
    verify(plans)
    assert {p.counters[ITERATION_BARRIER].step for p in plans} == {1}
    for total, _ in run(plans, ITERATIONS):
        want = np.full(WIDTH, ITERATIONS * (ITERATIONS + 1) / 2, np.float32)
        np.testing.assert_array_equal(total, want)


def test_two_stages_work_on_different_iterations_at_the_same_time() -> None:
    """While the second stage is in one iteration, the first one has begun the next: with a barrier
    over all ranks that cannot be.
    """
    plans = build(2, 1)
    verify(plans)
    (_, first), (_, second) = run(plans, 12, trace=4000)
    ahead, behind = np.concatenate(first), np.concatenate(second)
    begun = [ahead["begin"][ahead["iteration"] == i].min() for i in range(12)]
    ended = [behind["end"][behind["iteration"] == i].max() for i in range(12)]
    assert any(begun[i + 1] < ended[i] for i in range(11))


def waiting(plan: Plan) -> list[tuple[Place, Task]]:
    """The tasks that wait for the iteration before."""
    return [(k, t) for k, t in tasks(plan).items() if any(n == 0 for _, n in t.waits)]


def forget_the_reader(plan: Plan, rng: random.Random) -> Plan:
    place, task = rng.choice(waiting(plan))
    return replace_task(plan, place, waits=tuple(w for w in task.waits if w[1]))


def wait_for_the_reader_of_this_iteration(plan: Plan, rng: random.Random) -> Plan:
    place, task = rng.choice(waiting(plan))
    return replace_task(plan, place, waits=tuple((c, 1) for c, _ in task.waits))


def tell_before_the_read(plan: Plan, rng: random.Random) -> Plan:
    """A reader's signal goes to a task that its rank runs earlier."""
    told = [c.id for c in plan.counters if c.name.endswith(".read") and c.rank != plan.rank]
    place, task = rng.choice([(k, t) for k, t in tasks(plan).items() if set(t.signals) & set(told)])
    moved = tuple(c for c in task.signals if c in told)
    kept = tuple(c for c in task.signals if c not in told)
    changed = replace_task(plan, place, signals=kept)
    first = next(k for k, t in tasks(plan).items() if t.op == 0)
    assert first != place
    return replace_task(changed, first, signals=tasks(changed)[first].signals + moved)


def never_tell(plan: Plan, rng: random.Random) -> Plan:
    told = [c.id for c in plan.counters if c.name.endswith(".read") and c.rank != plan.rank]
    place, task = rng.choice([(k, t) for k, t in tasks(plan).items() if set(t.signals) & set(told)])
    return replace_task(plan, place, signals=tuple(c for c in task.signals if c not in told))


def wait_for_all_ranks(plan: Plan, rng: random.Random) -> Plan:
    counters = list(plan.counters)
    counters[ITERATION_BARRIER] = dataclasses.replace(counters[ITERATION_BARRIER], step=3)
    return dataclasses.replace(plan, counters=tuple(counters))


MUTATIONS: list[tuple[int, Callable[[Plan, random.Random], Plan]]] = [
    (0, forget_the_reader),
    (1, forget_the_reader),
    (0, wait_for_the_reader_of_this_iteration),
    (1, tell_before_the_read),
    (1, never_tell),
    (2, wait_for_all_ranks),
]


@pytest.mark.parametrize(("rank", "mutate"), MUTATIONS, ids=lambda v: getattr(v, "__name__", v))
@pytest.mark.parametrize("machine", ["cpu-1", "cpu-2"])
def test_every_mutation_is_refused(
    rank: int, mutate: Callable[[Plan, random.Random], Plan], machine: str
) -> None:
    plans = build(3, 1, machine)
    for seed in range(5):
        changed = list(plans)
        changed[rank] = mutate(plans[rank], random.Random(seed))
        with pytest.raises(PlanError, match="the plan is refused"):
            verify(changed)


def test_ranks_that_add_up_begin_together() -> None:
    graphs = []
    for rank in range(2):
        model = Model(rank, 2)
        with use_model(model):
            stage(rank, 0, 2)
            ark.all_reduce(ark.tensor([8], name="more"), rank, 2)
        graphs.append(model.graph)
    plans = plan_ranks(graphs, registry.machine("cpu-2"))
    verify(plans)
    assert {p.counters[ITERATION_BARRIER].step for p in plans} == {2}
    assert not any(waiting(p) for p in plans)


def test_an_all_reduce_without_the_barrier_of_all_ranks_is_refused() -> None:
    graphs = []
    for rank in range(2):
        model = Model(rank, 2)
        with use_model(model):
            ark.all_reduce(ark.tensor([8], name="more"), rank, 2)
        graphs.append(model.graph)
    broken = []
    for plan in plan_ranks(graphs, registry.machine("cpu-2")):
        barriers = [
            c.id for c in plan.counters if c.name == "iteration barrier" and c.rank != plan.rank
        ]
        changed = plan
        for place, task in tasks(plan).items():
            kept = tuple(c for c in task.signals if c not in barriers)
            changed = replace_task(changed, place, signals=kept)
        counters = list(changed.counters)
        counters[ITERATION_BARRIER] = dataclasses.replace(counters[ITERATION_BARRIER], step=1)
        broken.append(dataclasses.replace(changed, counters=tuple(counters)))
    with pytest.raises(PlanError, match="next iteration wait for the first"):
        verify(broken)
