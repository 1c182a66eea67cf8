"""The verifier applied to plans of several ranks with one change: a put to a wrong rank or buffer,
or a wait or signal that is missing or wrong.
"""

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
from tests.slow import examples
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
    """The verifier refuses every mutation of either rank's plan on every machine: 2 seeds, 10 in
    `nox -s slow`, 12 times as many in `nox -s plan_fuzz`.
    """
    verify(plans)
    accepted = []
    for seed in range(examples(10) * MORE):
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
