"""Computes the shared memory of a block that a kernel needs besides its ring. Called by
ark.backend.codegen.writer, and by ark.runtime.admission before a plan is loaded.
"""

from __future__ import annotations

from ark.backend.codegen import layout
from ark.backend.codegen.bodies import body_scratch, flows, kernel_ops
from ark.backend.codegen.dialect import Dialect
from ark.errors import PlanError
from ark.machine import Machine
from ark.plan import kind as kinds
from ark.plan.types import Plan

MIN_TASK_BYTES = 256  # bytes that every task may use


def _needed(plan: Plan, machine: Machine, dialect: Dialect, phases: range | None) -> int:
    """Bytes for the loop and for the largest task of the phases; the latter is rounded up to a
    multiple of 16.
    """
    signatures = [kinds.signature(plan, op) for op in kernel_ops(plan, phases)]
    needs = [MIN_TASK_BYTES, *(body_scratch(sig, machine, dialect) for sig in signatures)]
    if flows(signatures, machine, dialect):
        needs.append(layout.FLOW_TASKS * layout.dtype("ArkTask").itemsize)
    return layout.LOOP_BYTES + (max(needs) + 15) // 16 * 16


def check_shared_memory(
    plan: Plan, machine: Machine, dialect: Dialect, phases: range | None = None
) -> int:
    """Bytes of shared memory that the phases (by default all) need besides the ring. Raises
    PlanError if a processor has less.
    """
    needed = _needed(plan, machine, dialect, phases)
    room = machine.task_bytes + layout.LOOP_BYTES
    if needed > room:
        raise PlanError(
            f"the plan is refused: its largest task and the loop need {needed} bytes of shared "
            f"memory, a processor of {machine.name} has {room}"
        )
    return needed
