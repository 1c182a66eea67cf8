"""The verifier against mutated plans of several ranks: a put, wait or signal that goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ark.errors import PlanError
from ark.machine.capability import Capability
from ark.plan.types import Plan
from ark.plan.verify import verify
from tests.cases.verify import MORE
from tests.cases.verify_ranks import MUTATIONS
from tests.unit.plan.shapes import decoder_plans, machine

MACHINES = {
    "one": machine(1),
    "five": machine(5),
    "gpu": machine(4, Capability.PACKETS, warps=2),
}


@pytest.fixture(scope="module", params=sorted(MACHINES))
def plans(request: pytest.FixtureRequest) -> list[Plan]:
    return decoder_plans(MACHINES[request.param], ranks=2)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_every_mutation_of_a_rank_is_refused(plans: list[Plan], mutate: Callable) -> None:
    """6 mutations x 3 machines x 10 seeds, on either rank in turn: 180 rank sets that do otherwise;
    `nox -s plan_fuzz` has 12 times as many.
    """
    verify(plans)
    accepted = []
    for seed in range(10 * MORE):
        rank = seed % 2
        changed = list(plans)
        changed[rank] = mutate(plans[rank], random.Random(seed))
        assert changed != plans
        try:
            verify(changed)
            accepted.append(seed)
        except PlanError as error:
            assert str(error).startswith("the plan is refused: ")
    assert accepted == []
