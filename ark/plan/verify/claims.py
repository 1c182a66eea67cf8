"""Part of the verifier: ops whose tiles are claimed. Each of their tasks takes the number of its
next tile from a counter, by an atomic add at run time. Such an op needs a counter that nothing else
uses, and its operands must be in memory of its own rank. The module ark.plan.verify.work checks
that tiles do not overlap.

Any task of the op may claim any tile. So all other checks treat each task as accessing all tiles,
and no conflicting op can run between the first and the last task of the op.
"""

from __future__ import annotations

from ark.plan import kind as kinds
from ark.plan.types import ITERATION_BARRIER, Plan
from ark.plan.verify.rank_set import RankSet, refuse


def check_claims(rank_set: RankSet) -> None:
    """Checks ops whose tiles processors claim: each processor takes the next tile from the op's
    counter at run time. Raises PlanError for the first such op without a counter of its own, or
    with an operand in memory that other processes access.
    """
    for plan in rank_set.checked_plans:
        used = {ITERATION_BARRIER}
        for tasks in (tasks for phase in plan.phases for tasks in phase.processors):
            for task in tasks:
                used.update(task.signals, (counter for counter, _ in task.waits))
        for op, sig in zip(plan.ops, rank_set.signatures(plan.rank), strict=True):
            tiles = kinds.get(op.kind).claims(sig)
            if op.claims is None and not tiles:
                continue
            if op.claims is None or not tiles:
                raise refuse(
                    f"op {op.name!r} of kind {op.kind!r} claims {tiles} tiles at run time, and its "
                    f"counter is {op.claims}; an op has such a counter exactly if it claims tiles"
                )
            _check_counter(plan, op.name, op.claims, tiles, used)
            used.add(op.claims)
            buffers = (plan.buffers[plan.tensors[t].buffer] for t in op.operands)
            for buffer in buffers:
                if buffer.rank != plan.rank or buffer.arena in ("symmetric", "host", "packet"):
                    raise refuse(
                        f"op {op.name!r} claims tiles at run time in {buffer.name!r} (arena "
                        f"{buffer.arena!r}, rank {buffer.rank}); expected memory that only this "
                        "rank uses"
                    )


def _check_counter(plan: Plan, name: str, number: int, tiles: int, used: set[int]) -> None:
    if not 0 <= number < len(plan.counters):
        raise refuse(f"op {name!r} claims tiles by counter {number}, which does not exist")
    counter = plan.counters[number]
    if number in used:
        raise refuse(
            f"op {name!r} claims tiles by counter {counter.name!r}, which another op or task uses; "
            "expected a counter of its own"
        )
    if counter.rank != plan.rank or counter.system:
        raise refuse(
            f"op {name!r} claims tiles by counter {counter.name!r}, which peers signal; expected a "
            f"counter of rank {plan.rank} with device scope"
        )
    if counter.step != tiles:
        raise refuse(
            f"op {name!r} claims {tiles} tiles, but the step of its counter {counter.name!r} is "
            f"{counter.step}; they must be equal"
        )
