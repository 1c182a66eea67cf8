"""Explains a failed launch: turns the data that the loop kernel wrote before it stopped into an
error message. Called by ark.runtime.executor.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from ark.backend.codegen.layout import ERROR_KINDS
from ark.plan.types import Plan, PlanOp
from ark.runtime.tables import Tables

NO_PROCESSOR = 0xFFFFFFFF


def explain(
    plan: Plan,
    tables: Tables,
    host: Any,
    counters: Sequence[int],
    phase_ends: Sequence[int],
    signallers: Mapping[str, Sequence[int]],
) -> str:
    """The error message for a failed launch: one paragraph with the task, tensor, counter and rank,
    and the expected and actual values.

    host: a record of the ArkHost structure. counters: the counters' values after the kernel has
    ended, by id. phase_ends: the iterations at which the phases end, except the last phase.
    signallers: for each counter, the peers that signal it. Many tasks may wait because one task is
    stuck; the message names the first one in program order.
    """
    index, op_id = int(host["error_task"]), int(host["error_op"])
    where = f"rank {plan.rank}, processor {int(host['error_processor'])}, iteration "
    where += str(int(host["error_iteration"]))
    kind = ERROR_KINDS.get(int(host["error"]), "unknown")
    expected, seen = int(host["error_expected"]), int(host["error_seen"])
    if kind == "index":
        seen -= (seen >> 31) << 32  # as a signed number
    task = "the start of an iteration"
    if index != NO_PROCESSOR and op_id != NO_PROCESSOR and op_id < len(plan.ops):
        op = plan.ops[op_id]
        coord = list(tables.listing[index][2].coord) if index < len(tables.listing) else []
        task = f"task {index} ({op.kind} of op {op.name!r}, tile {coord})"
    if kind == "index":
        return (
            f"{task} on {where} read the index {seen}, which is out of range (expected 0 to "
            f"{expected - 1}); check the token ids, indices or positions that were passed"
        )
    if kind == "logits":
        return (
            f"{task} on {where} read only NaN logits, so no token can be chosen; the weights "
            "hold NaN or infinities, or results overflow their type: check the checkpoint, or "
            "convert it to a type of larger range"
        )
    if kind == "alignment":
        return (
            f"the kernel's shared memory on rank {plan.rank}, processor "
            f"{int(host['error_processor'])} begins at address {seen}, which is not a multiple of "
            f"{expected}, so its results would be wrong; the compiler ignored the requested "
            "alignment: install another version (`ark doctor` names it) and run `ark cache clear`"
        )
    counter = int(host["error_counter"])
    first = _first_unmet(plan, tables, counters, int(host["error_iteration"]), phase_ends)
    if (
        first is not None
        and kind != "operand stream"
        and (index == NO_PROCESSOR or first[0] < op_id)
    ):
        _, index, counter, expected, seen = first
        op = plan.ops[first[0]]
        _, processor, waiting = tables.listing[index]
        task = f"task {index} ({op.kind} of op {op.name!r}, tile {list(waiting.coord)})"
        where = f"rank {plan.rank}, processor {processor}, iteration {int(host['error_iteration'])}"
        kind = "counter"
    subject = f"a {kind}"
    cause = "a peer that has ended"
    if kind == "proxy" and op_id < len(plan.ops):
        far = _far_ranks(plan, plan.ops[op_id])
        if far:
            subject = f"the answer of rank {far} on another host to what the proxy put there"
            cause = f"{cause}, a broken link between hosts"
    if kind == "packet" and op_id < len(plan.ops):
        subject += _of_peers(plan, plan.ops[op_id])
    if kind in ("counter", "iteration barrier") and counter < len(plan.counters):
        producers = _producers(plan, counter, signallers)
        subject = f"counter {plan.counters[counter].name!r} of {producers}"
    return (
        f"{task} on {where} waited for {subject} longer than its budget: expected {expected}, seen "
        f"{seen}. A producer is missing or stuck: a plan that was changed by hand, {cause}, or a "
        "budget that is too short for this machine"
    )


def _first_unmet(
    plan: Plan, tables: Tables, counters: Sequence[int], iteration: int, phase_ends: Sequence[int]
) -> tuple[int, int, int, int, int] | None:
    """Returns (op, task, counter, expected value, actual value) of the first wait, in program
    order, whose counter did not reach the expected value.
    """
    number = bisect.bisect_right(phase_ends, iteration)
    phase_iteration = iteration - (phase_ends[number - 1] if number else 0)
    unmet = [
        (
            task.op,
            index,
            counter,
            plan.counters[counter].step * phase_iteration + threshold,
            counters[counter],
        )
        for index, (phase, _, task) in enumerate(tables.listing)
        if phase == number
        for counter, threshold in task.waits
        if counters[counter] < plan.counters[counter].step * phase_iteration + threshold
    ]
    return min(unmet, default=None)


def _far_ranks(plan: Plan, op: PlanOp) -> str:
    """The numbers of the ranks on other hosts whose memory an op of the kind `transfer` accesses,
    as text for the error message.
    """
    hosts = plan.meta.get("hosts") or [0] * plan.world_size
    ranks = {plan.buffers[plan.tensors[i].buffer].rank for i in op.operands}
    return ", ".join(str(r) for r in sorted(ranks) if hosts[r] != hosts[plan.rank])


def _of_peers(plan: Plan, op: PlanOp) -> str:
    """The ranks whose packets this op may wait for, as text; empty unless peers write its
    operands.
    """
    read = [plan.tensors[i] for i in op.operands if plan.tensors[i].packet]
    buffers = [plan.buffers[tensor.buffer] for tensor in read]
    if not any(b.arena == "symmetric" and b.rank == plan.rank for b in buffers):
        return ""
    peers = [str(rank) for rank in range(plan.world_size) if rank != plan.rank]
    return f" of rank {' or '.join(peers)}"


def _producers(plan: Plan, counter: int, signallers: Mapping[str, Sequence[int]]) -> str:
    """The tensors whose tasks signal the counter, with the ranks of those that are peers'
    tensors.
    """
    ops = sorted(
        {
            task.op
            for phase in plan.phases
            for tasks in phase.processors
            for task in tasks
            if counter in task.signals
        }
    )
    names = []
    for op in ops[:3]:
        tensors = plan.ops[op].operands  # none if the op ends an iteration
        tensor = f" (tensor {plan.tensors[tensors[-1]].name!r})" if tensors else ""
        names.append(f"{plan.ops[op].name!r}{tensor}")
    ranks = signallers.get(plan.counters[counter].name, ())
    if ranks:
        names.append(f"rank {', '.join(map(str, ranks))}")
    return ", ".join(names) or "a peer rank"
