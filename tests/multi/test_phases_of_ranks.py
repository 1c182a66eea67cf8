"""Plans of ranks with several phases, in which each rank starts its iterations without waiting for
the other ranks (no lockstep).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from ark.errors import PlanError
from ark.plan.types import ITERATION_BARRIER, Plan
from ark.plan.verify import verify
from tests.cases.phases_of_ranks import EACH, WIDTH, Body, build, messages, sums
from tests.cases.pipeline import run
from tests.slow import slow

WANTED = float(sum(range(1, 5)) + sum(4 + 1000 * i for i in range(1, 8)))


@pytest.mark.parametrize(
    ("body", "late"),
    [
        (messages, 0),
        pytest.param(sums, 1, marks=slow),
        pytest.param(messages, 1, marks=slow),
        pytest.param(sums, 0, marks=slow),
    ],
)
def test_each_phase_runs_on_every_rank_by_itself(body: Body, late: int) -> None:
    plans = build(body, 2, late)
    verify(plans)
    assert [p.counters[ITERATION_BARRIER].step for p in plans] == [1, 1]
    assert len(plans[0].phases) == 2
    for total, _ in run(plans, EACH):  # type: ignore[arg-type]
        np.testing.assert_array_equal(total, np.full(WIDTH, WANTED, np.float32))


def test_rank_begins_a_phase_while_a_peer_is_in_the_preceding_one() -> None:
    plans = build(messages, 2, 1)
    (_, first), (_, second) = run(plans, EACH, trace=4000)  # type: ignore[arg-type]
    ahead, behind = np.concatenate(first), np.concatenate(second)
    begun = ahead["begin"][ahead["iteration"] == EACH[0]].min()
    ended = behind["end"][behind["iteration"] == EACH[0] - 1].max()
    assert begun < ended


def shared_receive_buffers(plan: Plan) -> Plan:
    """Plants a fault: places the receive buffers of the second phase in the memory of the first
    phase's receive buffers.
    """
    received = [b for b in plan.buffers if b.arena == "symmetric" and b.rank == plan.rank]
    first, second = received
    moved = dataclasses.replace(second, offset=first.offset)
    return dataclasses.replace(
        plan, buffers=tuple(moved if b is second else b for b in plan.buffers)
    )


def shared_counters(plan: Plan) -> Plan:
    """Plants a fault: replaces a counter of the second phase by one of the first."""
    signals = [
        [c for tasks in phase.processors for t in tasks for c in t.signals if c]
        for phase in plan.phases
    ]
    steps = {c.id: c.step for c in plan.counters if c.rank == plan.rank and not c.system}
    old, new = next(
        (b, a) for b in signals[1] for a in signals[0] if steps.get(a, 0) == steps.get(b, -1)
    )
    phase = plan.phases[1]
    processors = tuple(
        tuple(
            dataclasses.replace(
                t,
                waits=tuple((new if c == old else c, n) for c, n in t.waits),
                signals=tuple(new if c == old else c for c in t.signals),
            )
            for t in tasks
        )
        for tasks in phase.processors
    )
    changed = dataclasses.replace(phase, processors=processors)
    return dataclasses.replace(plan, phases=(plan.phases[0], changed))


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (shared_receive_buffers, "access the same memory"),
        (shared_counters, "signalled in the phases"),
    ],
)
def test_memory_that_phases_may_not_share_is_refused(
    mutate: Callable[[Plan], Plan], message: str
) -> None:
    plans = build(messages, 2, 1)
    verify(plans)
    with pytest.raises(PlanError, match=message):
        verify([plans[0], mutate(plans[1])])
