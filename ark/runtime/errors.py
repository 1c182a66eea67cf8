"""Explains, in a person's words, what the loop kernel wrote into its mailbox before it gave up."""

from __future__ import annotations

from typing import Any

from ark.codegen.layout import ERROR_KINDS
from ark.plan.types import Plan
from ark.runtime.tables import Tables

NOBODY = 0xFFFFFFFF


def explain(plan: Plan, tables: Tables, host: Any) -> str:
    """One paragraph naming task, tensor, counter, rank, and what was expected and seen.

    host: a record of the ArkHost structure.
    """
    index, op_id = int(host["error_task"]), int(host["error_op"])
    where = f"rank {plan.rank}, processor {int(host['error_processor'])}, iteration "
    where += str(int(host["error_iteration"]))
    kind = ERROR_KINDS.get(int(host["error"]), "unknown")
    expected, seen = int(host["error_expected"]), int(host["error_seen"])
    task = "the start of an iteration"
    if index != NOBODY and op_id != NOBODY and op_id < len(plan.ops):
        op = plan.ops[op_id]
        coord = list(tables.listing[index][2].coord) if index < len(tables.listing) else []
        task = f"task {index} ({op.kind} of op {op.name!r}, tile {coord})"
    if kind == "index":
        return (
            f"{task} on {where} met the index {seen}, which is out of range (expected 0 to "
            f"{expected - 1}); check the token ids or indices that were passed"
        )
    counter = int(host["error_counter"])
    subject = f"a {kind}"
    if kind in ("counter", "iteration gate") and counter < len(plan.counters):
        producers = _producers(plan, counter)
        subject = f"counter {plan.counters[counter].name!r} of {producers}"
    return (
        f"{task} on {where} waited for {subject} longer than its budget: expected {expected}, seen "
        f"{seen}. A producer is missing or stuck: a plan that was changed by hand, a peer that died, "
        "or a budget that is too short for this machine"
    )


def _producers(plan: Plan, counter: int) -> str:
    """The tensors whose tasks signal the counter."""
    ops = sorted(
        {
            task.op
            for phase in plan.phases
            for tasks in phase.processors
            for task in tasks
            if counter in task.signals
        }
    )
    if not ops:
        return "a peer rank"
    names = []
    for op in ops[:3]:
        tensors = plan.ops[op].operands
        names.append(f"{plan.ops[op].name!r} (tensor {plan.tensors[tensors[-1]].name!r})")
    return ", ".join(names)
