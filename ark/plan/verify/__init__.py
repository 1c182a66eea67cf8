"""The verifier. Every plan must be accepted here before it runs, whether it was created in this
process or read from a file.

The plans of all ranks are checked against each other. Of ranks that do the same work, only one is
checked (module `symmetry`).

The verifier derives the order of tasks from the finished plan only; it uses no intermediate result
of the planner. It checks, each in the module in parentheses:

- Every reference exists and every box is inside its operand (structure).
- Every op is valid for its task kind and is computed completely (work), also if tiles are claimed
  at run time (claims).
- Each counter gets as many signals as the plan states, and waits cannot form a cycle (order).
- Tasks that access the same memory run in program order (conflicts).
- Nothing is read before it is written (reads), also by device functions that read before their
  task's waits are complete (early).
- Ranks that begin iterations independently do not conflict with other iterations of their peers
  (iterations).
"""

from __future__ import annotations

from collections.abc import Sequence

from ark import log
from ark.plan.collector import paused
from ark.plan.rotated import mark_verified
from ark.plan.types import ITERATION_BARRIER, Plan
from ark.plan.verify.claims import check_claims
from ark.plan.verify.conflicts import LocalTouches, check_conflicts, foreign_touches
from ark.plan.verify.early import check_early
from ark.plan.verify.iterations import check_iterations
from ark.plan.verify.order import first_nodes, order_phase
from ark.plan.verify.packets import awaited_packets
from ark.plan.verify.phases import Touches, check_counters, check_memory
from ark.plan.verify.rank_set import RankSet
from ark.plan.verify.reads import check_delivered, check_fetched, missing_reads
from ark.plan.verify.structure import check_ranks, check_sizes, check_structure, check_tasks
from ark.plan.verify.symmetry import symmetry_of
from ark.plan.verify.work import check_work


def verify(plans: Sequence[Plan]) -> None:
    """Accepts the plans of all ranks, in rank order. Raises PlanError with the first fault
    otherwise.
    """
    with log.timed(f"verified {_counted(plans)}"):
        check_ranks(plans)
        check(RankSet(plans, symmetry_of(plans)))
        mark_verified(plans)


def _counted(plans: Sequence[Plan]) -> str:
    """The number of plans and ops, as text for a message."""
    ops = len(plans[0].ops) if plans else 0
    return f"{len(plans)} plan(s) of {ops} ops each"


@paused()
def check(rank_set: RankSet) -> None:
    """Runs all checks on the plans of all ranks. Raises PlanError with the first fault."""
    check_structure(rank_set)
    check_work(rank_set)
    check_claims(rank_set)
    check_tasks(rank_set)
    check_counters(rank_set)
    barrier = rank_set.plan(0).counters[ITERATION_BARRIER]
    faults = []
    for number in range(len(rank_set.plan(0).phases)):
        touches = _check_phase(rank_set, number)
        if rank_set.world > 1 and barrier.step == 1:
            faults.append(touches)
    check_memory(rank_set, faults)
    for plan in rank_set.checked_plans:
        check_sizes(plan)


def _check_phase(rank_set: RankSet, number: int) -> Touches:
    """Checks one phase. Returns two groups of memory accesses: those of each checked rank to its
    own memory, and those of peers to it.
    """
    local = {rank: LocalTouches(rank_set, rank, number) for rank in rank_set.checked}
    foreign = foreign_touches(rank_set, number)
    bases = first_nodes(rank_set, number)
    packets = awaited_packets(rank_set, number, local, foreign, bases)
    order = order_phase(rank_set, number, packets)
    check_conflicts(rank_set, order, number, local, foreign)
    for rank in rank_set.checked:
        missing = missing_reads(rank_set, rank, number)
        check_delivered(rank_set, order, number, rank, missing, foreign[rank])
        check_early(rank_set, number, rank, foreign[rank])
        check_fetched(rank_set, order, number, rank, local[rank], foreign[rank])
    check_iterations(rank_set, number, local, foreign, packets, order)
    return local, foreign


__all__ = ["check", "verify"]
