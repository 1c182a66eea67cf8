"""Ranks begin iterations independently: a pipeline has several micro-batches in flight. Messages
and parts of collectives that a stage has not read yet are not overwritten.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.backend.codegen.writer import write
from ark.errors import PlanError
from ark.frontend.model import Model, use_model
from ark.lower.ranks import plan_ranks
from ark.machine import Machine
from ark.plan.types import ITERATION_BARRIER, Plan, Task
from ark.plan.verify import verify
from tests.cases.collectives import devices
from tests.cases.pipeline import ITERATIONS, WIDTH, planned, run
from tests.slow import in_turns, slow
from tests.unit.plan.oracle import tasks
from tests.unit.plan.shapes import replace_task

SLOW_PRODUCT_SIZE = 1000  # a slow rank's product takes far longer than a thread spins for
Place = tuple[int, int, int]


def stage(rank: int, slow: int, world: int, work: int = 300) -> None:
    """Builds the model of one pipeline stage. Rank 0 counts micro-batches and sends the number in
    every element. Each rank adds up what it receives and passes it on. Stage `slow` also computes
    something long.
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
        product = ark.matmul(ark.tensor([work, work]), ark.tensor([work, work]))
        row = ark.reduce_sum(ark.reduce_sum(ark.mul(product, 0.0), axis=0), axis=1)
        ark.add(total, ark.add(batch, ark.reshape(row, (1,))), output=total)
    else:
        ark.add(total, batch, output=total)
    if rank + 1 < world:
        ark.send(batch, rank + 1, tag=0)


def build(world: int, slow: int, machine: Machine | str = "cpu-1", work: int = 300) -> list[Plan]:
    graphs = []
    for rank in range(world):
        model = Model(rank, world)
        with use_model(model):
            stage(rank, slow, world, work)
        graphs.append(model.graph)
    return planned(graphs, machine)


@pytest.mark.parametrize(("machine", "slow"), in_turns(["cpu-1", "cpu-2"], [(0,), (1,), (2,)]))
def test_no_stage_sees_a_micro_batch_twice_or_misses_one(machine: str, slow: int) -> None:
    """Three pipeline stages add up the numbers of micro-batches, 1 to 40, without missing or
    repeating one, with any rank as the slow one.
    """
    plans = build(3, slow, machine)
    verify(plans)
    assert {p.counters[ITERATION_BARRIER].step for p in plans} == {1}
    for total, _ in run(plans, ITERATIONS):
        want = np.full(WIDTH, ITERATIONS * (ITERATIONS + 1) / 2, np.float32)
        np.testing.assert_array_equal(total, want)


def test_two_stages_work_on_different_iterations_at_the_same_time() -> None:
    """Two stages run different iterations at the same time. A barrier over all ranks would prevent
    this.
    """
    plans = build(2, 1, work=SLOW_PRODUCT_SIZE)
    verify(plans)
    (_, first), (_, second) = run(plans, 12, trace=4000)
    ahead, behind = np.concatenate(first), np.concatenate(second)
    begun = [ahead["begin"][ahead["iteration"] == i].min() for i in range(12)]
    ended = [behind["end"][behind["iteration"] == i].max() for i in range(12)]
    assert any(begun[i + 1] < ended[i] for i in range(11))


@pytest.mark.parametrize("name", ["cuda", pytest.param("rocm", marks=slow)])
def test_stages_on_a_gpu_stay_within_one_iteration(name: str) -> None:
    """On GPUs, neither a stage that sends to a slower one nor a rank that only sends runs too far
    ahead. AMD's GPUs are emulated.
    """
    with devices(name, 2) as (opened, machine):
        for plans, width in (
            (build(2, 1, machine, 40), WIDTH),
            (build_broadcast(2, 40, "one_shot", machine, 40), 40),
            (build_broadcast(2, WIDTH, "ring", machine, 40), WIDTH),
        ):
            verify(plans)
            assert any(waiting(p) for p in plans)
            for total, _ in run(plans, 6, width=width, name=name, opened=opened):
                np.testing.assert_array_equal(total, np.full(width, 21, np.float32))


def waiting(plan: Plan) -> list[tuple[Place, Task]]:
    """Returns the tasks that wait for the previous iteration."""
    return [(k, t) for k, t in tasks(plan).items() if any(n == 0 for _, n in t.waits)]


def forget_the_reader(plan: Plan, rng: random.Random) -> Plan:
    place, task = rng.choice(waiting(plan))
    return replace_task(plan, place, waits=tuple(w for w in task.waits if w[1]))


def wait_for_the_reader_of_this_iteration(plan: Plan, rng: random.Random) -> Plan:
    place, task = rng.choice(waiting(plan))
    return replace_task(plan, place, waits=tuple((c, 1) for c, _ in task.waits))


def tell_before_the_read(plan: Plan, rng: random.Random) -> Plan:
    """Plants a fault: the signal that tells a peer "the data were read" is sent too early. It is
    moved from the task that reads the data to the first task of the rank.
    """
    read_counters = [
        c.id for c in plan.counters if c.name.endswith(".read") and c.rank != plan.rank
    ]
    place, task = rng.choice(
        [(k, t) for k, t in tasks(plan).items() if set(t.signals) & set(read_counters)]
    )
    moved = tuple(c for c in task.signals if c in read_counters)
    kept = tuple(c for c in task.signals if c not in read_counters)
    changed = replace_task(plan, place, signals=kept)
    first = next(k for k, t in tasks(plan).items() if t.op == 0)
    assert first != place
    return replace_task(changed, first, signals=tasks(changed)[first].signals + moved)


def never_tell(plan: Plan, rng: random.Random) -> Plan:
    read_counters = [
        c.id for c in plan.counters if c.name.endswith(".read") and c.rank != plan.rank
    ]
    place, task = rng.choice(
        [(k, t) for k, t in tasks(plan).items() if set(t.signals) & set(read_counters)]
    )
    return replace_task(
        plan, place, signals=tuple(c for c in task.signals if c not in read_counters)
    )


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


def reduce_stage(rank: int, world: int, width: int, algorithm: str, work: int = 300) -> None:
    """The model of a rank that counts iterations and sums the counts of all ranks. Rank 1 then
    computes for a long time.
    """
    place = (rank, world)
    batch = ark.tensor([width], name="batch")
    ark.add(batch, 1.0, output=batch)
    mine = ark.mul(batch, float(rank + 1))
    summed = ark.all_reduce(mine, *place, algorithm=algorithm)
    gathered = ark.all_gather(ark.reshape(summed, (1, width)), *place)
    last = ark.copy(ark.reshape(gathered, (-1, width))[world - 1 : world])
    last = ark.reshape(last, (width,))
    total = ark.tensor([width], name="total")
    if rank == 1:
        product = ark.mul(ark.matmul(ark.tensor([work, work]), ark.tensor([work, work])), 0.0)
        row = ark.reduce_sum(ark.reduce_sum(product, axis=0), axis=1)
        ark.add(total, ark.add(last, ark.reshape(row, (1,))), output=total)
    else:
        ark.add(total, last, output=total)


def build_reduce(
    world: int,
    width: int,
    algorithm: str = "one_shot",
    machine: str = "cpu-2",
    lockstep: bool = False,
    work: int = 300,
) -> list[Plan]:
    graphs = []
    for rank in range(world):
        model = Model(rank, world)
        with use_model(model):
            reduce_stage(rank, world, width, algorithm, work)
        graphs.append(model.graph)
    return planned(graphs, machine, lockstep)


# The first sum travels as packets, the second is signalled by counters.
@pytest.mark.parametrize(
    ("width", "algorithm"),
    [
        (40, "one_shot"),
        (WIDTH, "ring"),
        pytest.param(WIDTH, "double_binary_tree", marks=slow),
        pytest.param(WIDTH, "one_shot", marks=slow),
        pytest.param(40, "ring", marks=slow),
        pytest.param(40, "double_binary_tree", marks=slow),
    ],
)
def test_sums_are_right_without_a_barrier_of_all_ranks(width: int, algorithm: str) -> None:
    """The sums of three ranks are right, although ranks begin iterations independently and one is
    slower: each element adds up 1 + 2 + 3 times the numbers 1 to 40.
    """
    plans = build_reduce(3, width, algorithm)
    verify(plans)
    assert {p.counters[ITERATION_BARRIER].step for p in plans} == {1}
    for total, _ in run(plans, ITERATIONS, width=width):
        want = np.full(width, 6 * ITERATIONS * (ITERATIONS + 1) / 2, np.float32)
        np.testing.assert_array_equal(total, want)


def test_rank_begins_while_a_peer_is_in_the_preceding_iteration() -> None:
    """Rank 0 begins the next iteration, after it has got its sum, while rank 1 still computes."""
    plans = build_reduce(2, WIDTH, work=SLOW_PRODUCT_SIZE)
    (_, first), (_, second) = run(plans, 12, trace=4000)
    ahead, behind = np.concatenate(first), np.concatenate(second)
    begun = [ahead["begin"][ahead["iteration"] == i].min() for i in range(12)]
    ended = [behind["end"][behind["iteration"] == i].max() for i in range(12)]
    assert any(begun[i + 1] < ended[i] for i in range(11))


@pytest.mark.parametrize("width", [40, WIDTH])
def test_lockstep_makes_ranks_begin_iterations_together(width: int) -> None:
    plans = build_reduce(3, width, lockstep=True)
    verify(plans)
    assert {p.counters[ITERATION_BARRIER].step for p in plans} == {3}
    assert not any(waiting(p) for p in plans)


def end_before_the_end(plan: Plan, rng: random.Random) -> Plan:
    """Plants a fault: rank 0 receives the signal that a peer has ended an iteration before the peer
    has read rank 0's data.
    """
    return never_end(plan, rng, moved=True)


def never_end(plan: Plan, rng: random.Random, moved: bool = False) -> Plan:
    ended = {c.id for c in plan.counters if c.name.startswith("ended+") and c.rank == 0}
    place, task = next((k, t) for k, t in tasks(plan).items() if set(t.signals) & ended)
    changed = replace_task(plan, place, signals=tuple(c for c in task.signals if c not in ended))
    if not moved:
        return changed
    first = next(k for k, t in tasks(plan).items() if t.op == 0)
    return replace_task(changed, first, signals=(*tasks(changed)[first].signals, *ended))


def build_broadcast(
    world: int, width: int, algorithm: str, machine: Machine | str = "cpu-2", work: int = 300
) -> list[Plan]:
    """Returns plans in which rank 0 sends the iteration's number to the others and receives nothing
    from them.
    """
    graphs = []
    for rank in range(world):
        model = Model(rank, world)
        with use_model(model):
            batch, total = (ark.tensor([width], name=name) for name in ("batch", "total"))
            ark.add(batch, 1.0, output=batch)
            received = ark.broadcast(batch, rank, world, algorithm=algorithm)
            if rank == 1:
                ark.matmul(ark.tensor([work, work]), ark.tensor([work, work]))
            ark.add(total, received, output=total)
        graphs.append(model.graph)
    return planned(graphs, machine)


@pytest.mark.parametrize(
    ("width", "algorithm"),
    [
        (40, "one_shot"),
        (WIDTH, "double_binary_tree"),
        pytest.param(WIDTH, "one_shot", marks=slow),
        pytest.param(40, "double_binary_tree", marks=slow),
    ],
)
def test_rank_that_only_sends_is_at_most_one_iteration_ahead(width: int, algorithm: str) -> None:
    """A rank that only sends does not overwrite data that were not read: each receiver adds up 1 to
    40.
    """
    plans = build_broadcast(3, width, algorithm)
    verify(plans)
    for total, _ in run(plans, ITERATIONS, width=width):
        want = np.full(width, ITERATIONS * (ITERATIONS + 1) / 2, np.float32)
        np.testing.assert_array_equal(total, want)


@pytest.mark.parametrize(
    ("rank", "mutate"), [(0, forget_the_reader), (1, end_before_the_end), (2, never_end)]
)
@pytest.mark.parametrize("width", [40, WIDTH])
@pytest.mark.parametrize("algorithm", ["one_shot", "double_binary_tree"])
def test_every_mutation_of_a_broadcast_is_refused(
    rank: int, mutate: Callable[[Plan, random.Random], Plan], width: int, algorithm: str
) -> None:
    plans = build_broadcast(3, width, algorithm)
    for seed in range(4):
        changed = list(plans)
        changed[rank] = mutate(plans[rank], random.Random(seed))
        with pytest.raises(PlanError, match="the plan is refused"):
            verify(changed)


def test_source_is_the_same_text_for_both_forms() -> None:
    backend = registry.get("cuda")
    machine, dialect = registry.machine("h100"), backend.dialect("sm_90a")
    alone, lockstep = (
        write(build_reduce(2, WIDTH, machine="h100", lockstep=joined)[0], machine, dialect)
        for joined in (False, True)
    )
    assert alone.source == lockstep.source


def test_symmetric_memory_requires_the_barrier_of_all_ranks() -> None:
    """Plans with one-sided puts keep the barrier between ranks, because the sender does not learn
    when the peer has read the data.
    """
    graphs = []
    for rank in range(2):
        model = Model(rank, 2)
        with use_model(model):
            place = ark.comm.symmetric([8], name="place")
            ark.comm.channel(1 - rank).put(ark.tensor([8], name="x"), place)
        graphs.append(model.graph)
    plans = plan_ranks(graphs, registry.machine("cpu-2"))
    assert {p.counters[ITERATION_BARRIER].step for p in plans} == {2}


def test_all_reduce_without_the_barrier_of_all_ranks_is_refused() -> None:
    graphs = []
    for rank in range(2):
        model = Model(rank, 2)
        with use_model(model):
            ark.all_reduce(ark.tensor([8], name="more"), rank, 2)
        graphs.append(model.graph)
    broken = []
    for plan in plan_ranks(graphs, registry.machine("cpu-2"), {"lockstep": True}):
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
    with pytest.raises(PlanError, match="next iteration does not wait for the first"):
        verify(broken)
