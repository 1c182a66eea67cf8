"""The verifier: a plan runs only if this accepts it. A plan from a file passes the same door.

All ranks' plans are checked together: that every name and box is in range (structure), that every
op is one that its kind can do, and is done wholly (work), that
counters add up and waits cannot cycle (order), that whatever touches the same memory is ordered as
the program orders it and nothing is read before it is written (conflicts). The order is derived
from the finished plan alone; nothing that the planner believed is used.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.plan.types import Plan
from ark.plan.verify.conflicts import check_conflicts
from ark.plan.verify.order import order_phase
from ark.plan.verify.structure import Fleet, check_structure, check_tasks
from ark.plan.verify.work import check_work


def verify(plans: Sequence[Plan]) -> None:
    """Accepts the plans of all ranks, in rank order, or raises PlanError with the first fault."""
    fleet = Fleet(tuple(plans))
    check_structure(fleet)
    check_work(fleet)
    check_tasks(fleet)
    for number in range(len(plans[0].phases)):
        check_conflicts(fleet, order_phase(fleet, number))


__all__ = ["verify"]
