"""Part of the verifier: stores that arrive after their task has ended.

The tasks of an op with the param `late` leave copies under way (ark.tasks.matmul, push); the task
`landed` of the same tile waits for them. Because it writes the same boxes to the plan, whoever
reads them is ordered behind it, or before it as the program says. What is left to see to is that
each tile's landing follows on its processor, and that no op in between reads what the op
stores. (A peer that reads then, and is waited for before the landing, is not looked for.)
"""

from __future__ import annotations

from collections import defaultdict

from ark.plan.types import Plan
from ark.plan.verify.rank_set import RankSet, refuse

LANDED = "landed"


def check_late(rank_set: RankSet, number: int) -> None:
    """Raises PlanError for the first tile of a phase that leaves and does not land as it must."""
    for rank in rank_set.checked:
        plan = rank_set.plan(rank)
        late = {op.id for op in plan.ops if op.params.get("late")}
        if late & set(rank_set.listing(rank, number).by_op):
            _check_lists(rank_set, plan, number, late)


def _check_lists(rank_set: RankSet, plan: Plan, number: int, late: set[int]) -> None:
    written: dict[int, set[int]] = defaultdict(set)  # by op, which operands
    for region in (r for touched in rank_set.touches(plan.rank, number) for r in touched):
        if region.write:
            written[region.op].add(region.boxes.operand)
    stored = {i: tuple(plan.ops[i].operands[o] for o in sorted(written[i])) for i in late}
    landings = {op.operands: op.id for op in plan.ops if op.kind == LANDED}
    for op in sorted(late):
        _check_between(rank_set, plan, number, op, landings.get(stored[op], op), stored[op])
    for tasks in plan.phases[number].processors:
        under_way: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        for task in tasks:
            if plan.ops[task.op].kind == LANDED:
                under_way.pop((plan.ops[task.op].operands, task.coord), None)
            elif task.op in late:
                under_way[stored[task.op], task.coord] = task.op
        for (_, coord), op in under_way.items():
            raise refuse(
                f"the tile {list(coord)} of op {plan.ops[op].name!r} leaves late and lands nowhere "
                "behind that on its processor"
            )


def _check_between(
    rank_set: RankSet, plan: Plan, number: int, op: int, landing: int, stored: tuple[int, ...]
) -> None:
    """Nobody reads what the op stores before it has landed."""
    memory = {plan.tensors[t].buffer for t in stored}
    for region in (r for touched in rank_set.touches(plan.rank, number) for r in touched):
        reader = plan.ops[region.op]
        read = plan.tensors[reader.operands[region.boxes.operand]].buffer
        if not region.write and op < region.op < landing and read in memory:
            raise refuse(
                f"op {reader.name!r} reads {plan.buffers[read].name!r}, where what op "
                f"{plan.ops[op].name!r} stores has not landed"
            )
