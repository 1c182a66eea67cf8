"""The verifier applied to mutated plans: it must refuse every mutation that can change the
result.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable

import pytest

from ark.errors import InvalidUsageError, PlanError
from ark.machine.capability import Capability
from ark.plan.serialize import from_json, to_json
from ark.plan.types import ITERATION_BARRIER, Plan, PlanOp
from ark.plan.verify import verify
from tests.cases.verify import (
    MACHINES,
    MORE,
    MUTATIONS,
    _alive,
    drop_wait,
    lower_threshold,
    needed_shared_bytes,
    with_shared_bytes,
)
from tests.slow import examples, slow
from tests.unit.plan.oracle import conflict, faults, tasks, touched
from tests.unit.plan.shapes import decoder_plans, machine, new_plans, replace_task, with_tasks


@pytest.fixture(scope="module", params=sorted(MACHINES))
def plan(request: pytest.FixtureRequest) -> Plan:
    return decoder_plans(MACHINES[request.param])[0]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_every_mutation_is_refused(plan: Plan, mutate: Callable) -> None:
    """The verifier refuses every mutation on every machine: 4 seeds, 20 in `nox -s slow`, 12 times
    as many in `nox -s plan_fuzz`.
    """
    accepted = []
    for seed in range(examples(20) * MORE):
        changed = mutate(plan, random.Random(seed))
        assert changed != plan
        try:
            verify([changed])
        except PlanError as error:
            assert str(error).startswith("the plan is refused: ")
        else:
            # One task opens the iteration barrier. It waits for the last task of every processor.
            # Therefore other waits of the same task are redundant, and a plan without them may be
            # accepted.
            waits = mutate in (drop_wait, lower_threshold)
            if not waits or any(faults(changed, n) for n in range(len(plan.phases))):
                accepted.append(seed)
    assert accepted == []


def test_memory_is_reused_only_if_counters_order_it() -> None:
    """Memory may be reused only after a counter, not after a packet. The test places each buffer at
    the address of every buffer whose lifetime has ended: the reader of a task's packet may run
    concurrently with that task's other readers.
    """
    (plan,) = decoder_plans(MACHINES["gpu"], chunk=8)
    assert any(t.packet for t in plan.tensors)
    alive = _alive(plan)
    buffers = [b for b in plan.buffers if b.arena == "activation"]
    fine = 0
    for first, second in itertools.permutations(buffers, 2):
        if alive[first.id][1] >= alive[second.id][0] or first.nbytes < second.nbytes:
            continue
        moved = list(plan.buffers)
        moved[second.id] = dataclasses.replace(second, offset=first.offset)
        changed = dataclasses.replace(plan, buffers=tuple(moved))
        if _accepted(changed):
            fine += 1
            assert faults(changed, 0) == [], (first.name, second.name)
    assert fine


def _accepted(plan: Plan) -> bool:
    try:
        verify([plan])
    except PlanError:
        return False
    return True


def test_planned_plans_have_no_fault_by_brute_force(plan: Plan) -> None:
    for number in range(len(plan.phases)):
        assert faults(plan, number) == []


def test_oracle_sees_a_dropped_wait() -> None:
    plan = decoder_plans(MACHINES["two"])[0]
    changed = drop_wait(plan, random.Random(3))
    assert any(faults(changed, n) for n in range(len(plan.phases)))


# `nox` tests each pair of a number of processors and a chunk once, with or without packets.
@pytest.mark.parametrize(
    ("processors", "chunk", "packets"),
    [
        pytest.param(p, chunk, packets, marks=[slow] * ((i + j) % 2 == packets))
        for i, p in enumerate((1, 2, 3, 7, 33))
        for j, chunk in enumerate((0, 1, 5, 64))
        for packets in (False, True)
    ],
)
def test_no_valid_plan_is_refused(processors: int, chunk: int, packets: bool) -> None:
    target = machine(processors, *([Capability.PACKETS] if packets else []))
    plans = decoder_plans(target, chunk)  # this verifies the plans
    verify([from_json(to_json(p)) for p in plans])


def test_harmless_swaps_are_accepted_and_no_others(plan: Plan) -> None:
    """Swaps adjacent tasks in a processor's list that share no bytes. The verifier accepts a swap
    exactly if brute force finds no fault.
    """
    places = [
        (number, processor, i)
        for number, phase in enumerate(plan.phases)
        for processor, own in enumerate(phase.processors)
        for i in range(len(own) - 1)
    ]
    random.Random(1).shuffle(places)
    accepted = refused = 0
    for number, processor, i in places:
        own = list(plan.phases[number].processors[processor])
        a, b = own[i], own[i + 1]
        if ITERATION_BARRIER in (*a.signals, *b.signals) or conflict(
            touched(plan, a), touched(plan, b)
        ):
            continue
        if accepted >= 2 and refused >= 2:
            break
        own[i], own[i + 1] = b, a
        changed = with_tasks(plan, number, processor, own)
        harmless = faults(changed, number) == []
        try:
            verify([changed])
        except PlanError:
            refused += 1
            assert not harmless
        else:
            accepted += 1
            assert harmless
    assert accepted >= 2 and refused >= 2


def test_waiting_twice_is_accepted(plan: Plan) -> None:
    """The verifier accepts a redundant wait: one for the same value as another wait, or for a
    smaller value.
    """
    rng = random.Random(2)
    places = sorted((k, t) for k, t in tasks(plan).items() if t.waits)
    for place, task in rng.sample(places, 5):
        counter, threshold = task.waits[0]
        for more in ((counter, threshold), (counter, 1)):
            changed = replace_task(plan, place, waits=(*task.waits, more))
            assert changed != plan
            verify([changed])


def test_shared_memory_that_just_suffices_is_enough(plan: Plan) -> None:
    verify([with_shared_bytes(plan, needed_shared_bytes(plan))])


@pytest.mark.parametrize("option", ["pinned", "Fuse", "packet"])
def test_option_that_the_planner_does_not_have_is_refused(option: str) -> None:
    with pytest.raises(InvalidUsageError, match=f"no option '{option}'.*external, fuse"):
        decoder_plans(MACHINES["two"], **{option: False})


def test_plans_are_deterministic_to_the_byte() -> None:
    for target in MACHINES.values():
        assert to_json(new_plans(target)[0]) == to_json(decoder_plans(target)[0])


def test_plans_have_no_barrier_between_ops() -> None:
    """Ops are not separated by barriers: some task starts while another processor still runs tasks
    of the previous op.
    """
    plan = decoder_plans(machine(4), chunk=16)[0]
    ops: dict[int, PlanOp] = {op.id: op for op in plan.ops}
    few = [
        t
        for t in tasks(plan).values()
        if t.waits and ops[t.op].kind.startswith("attention") and t.op < 6
    ]
    steps = {plan.counters[c].step for t in few for c, _ in t.waits}
    assert steps and max(steps) < 4
