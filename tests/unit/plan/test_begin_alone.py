"""Waits for the previous iteration, in plans whose ranks do not begin iterations together (no
lockstep). If such a wait is removed, the verifier must refuse the plan exactly if brute force finds
two tasks that can conflict.
"""

from __future__ import annotations

import pytest

from ark.errors import PlanError
from ark.lower.ranks import plan_ranks
from ark.plan.types import ITERATION_BARRIER, Plan
from ark.plan.verify import check, verify
from ark.plan.verify.rank_set import RankSet
from ark.plan.verify.symmetry import Symmetry, alone, symmetry_of
from tests.cases.phases_of_ranks import build, messages, sums
from tests.unit.plan.oracle import meetings, tasks
from tests.unit.plan.shapes import decoder_graphs, machine, replace_task


def decoder() -> list[Plan]:
    return list(plan_ranks(decoder_graphs(4), machine(2)))


PLANS = {
    "messages": lambda: build(messages, 3, 1),
    "sums": lambda: build(sums, 3, 1),
    "decoder": decoder,
}


def without_lags(plan: Plan) -> list[Plan]:
    """Returns, for each task that waits for the previous iteration, the plan without the task's
    waits for it.
    """
    lagging = [(k, t) for k, t in tasks(plan).items() if any(n == 0 for _, n in t.waits)]
    return [
        replace_task(plan, place, waits=tuple(w for w in task.waits if w[1]))
        for place, task in lagging
    ]


def accepted(plans: list[Plan], symmetry: Symmetry | None = None) -> bool:
    try:
        if symmetry is None:
            verify(plans)
        else:
            check(RankSet(plans, symmetry))
    except PlanError as error:
        texts = ("are not ordered", "nothing makes", "next iteration does not wait")
        assert any(text in str(error) for text in texts)
        return False
    return True


@pytest.mark.parametrize(
    ("name", "needed"), [("messages", True), ("sums", True), ("decoder", False)]
)
def test_wait_is_missed_if_brute_force_misses_it(name: str, needed: bool) -> None:
    """Without one of the waits for the previous iteration, the verifier refuses a plan exactly if
    brute force finds a conflict. needed: True for plans in which some of these waits are necessary.
    In a decoder none is, because a later sum proves the same order.
    """
    plans = PLANS[name]()
    assert plans[0].counters[ITERATION_BARRIER].step == 1
    assert accepted(plans) and not any(meetings(plans, n) for n in range(len(plans[0].phases)))
    faulty = []
    for changed in without_lags(plans[1]):
        others = [plans[0], changed, *plans[2:]]
        sound = not any(meetings(others, n) for n in range(len(changed.phases)))
        assert accepted(others) == sound
        faulty.append(not sound)
    assert faulty and set(faulty) == {needed}


def test_one_rank_stands_for_all_that_lack_the_same_wait() -> None:
    """If all ranks do the same work and lack the same wait, the verifier executes two iterations of
    one rank only, and decides as brute force does.
    """
    plans = build(sums, 3, slow=-1)
    assert symmetry_of(plans).checked == (0,)
    verdicts = []
    for changed in zip(*(without_lags(plan) for plan in plans), strict=True):
        others, symmetry = list(changed), symmetry_of(list(changed))
        assert symmetry.checked == (0,)
        sound = not any(meetings(others, n) for n in range(len(others[0].phases)))
        assert accepted(others, symmetry) == accepted(others, alone(3)) == sound
        verdicts.append(sound)
    assert verdicts == [False] * 4
