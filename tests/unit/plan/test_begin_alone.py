"""Waits for the iteration before, of ranks that begin iterations by themselves: the verifier
refuses a plan that lacks one exactly if brute force finds tasks that may meet.
"""

from __future__ import annotations

import pytest

from ark.errors import PlanError
from ark.lower.ranks import plan_ranks
from ark.plan.types import ITERATION_BARRIER, Plan
from ark.plan.verify import verify
from tests.multi.test_phases_of_ranks import build, messages, sums
from tests.unit.plan.oracle import meetings, tasks
from tests.unit.plan.shapes import decoder_graphs, machine, replace_task


def decoder() -> list[Plan]:
    return list(plan_ranks(decoder_graphs(4), machine(2)))


MADE = {
    "messages": lambda: build(messages, 3, 1),
    "sums": lambda: build(sums, 3, 1),
    "decoder": decoder,
}


def without_lags(plan: Plan) -> list[Plan]:
    """The plan without the waits for the iteration before of one task, for each that has some."""
    lagging = [(k, t) for k, t in tasks(plan).items() if any(n == 0 for _, n in t.waits)]
    return [
        replace_task(plan, place, waits=tuple(w for w in task.waits if w[1]))
        for place, task in lagging
    ]


def accepted(plans: list[Plan]) -> bool:
    try:
        verify(plans)
    except PlanError as error:
        assert "nothing makes" in str(error)
        return False
    return True


@pytest.mark.parametrize(
    ("name", "needed"), [("messages", True), ("sums", True), ("decoder", False)]
)
def test_a_wait_is_missed_if_brute_force_misses_it(name: str, needed: bool) -> None:
    """Only the wait says that a message was read, or a share of the one sum of an iteration. Who
    meets in another sum behind it, as in a decoder, knows that anyhow: each wait may go.
    """
    plans = MADE[name]()
    assert plans[0].counters[ITERATION_BARRIER].step == 1
    assert accepted(plans) and not any(meetings(plans, n) for n in range(len(plans[0].phases)))
    found = []
    for changed in without_lags(plans[1]):
        others = [plans[0], changed, *plans[2:]]
        sound = not any(meetings(others, n) for n in range(len(changed.phases)))
        assert accepted(others) == sound
        found.append(not sound)
    assert found and set(found) == {needed}
