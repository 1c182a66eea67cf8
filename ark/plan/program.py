"""Compares the computation of two plans: their ops in program order, without processors, schedule
and addresses.

Two plans of equal programs give the same results, so a plan from a file may replace another if
their programs are equal. Called by ark.models.load.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ark.plan.packing import from_meta
from ark.plan.types import Plan


def difference(plan: Plan, expected: Plan) -> str | None:
    """Describes the first way in which the plan computes something else than the expected plan, as
    text for an error message. None if both compute the same. Memory offsets, counters, and the
    order and processors of tasks may differ.
    """
    for table, actual, wanted in (
        ("ranks", (plan.rank, plan.world_size), (expected.rank, expected.world_size)),
        ("packed parameters", from_meta(plan.meta), from_meta(expected.meta)),
        ("phases", [p.name for p in plan.phases], [p.name for p in expected.phases]),
    ):
        if actual != wanted:
            return f"its {table} are {str(actual)[:200]}, expected {str(wanted)[:200]}"
    tables: tuple[tuple[str, tuple[Any, ...], tuple[Any, ...]], ...] = (
        ("buffer", _placeless(plan), _placeless(expected)),
        ("tensor", plan.tensors, expected.tensors),
        ("op", _phased(plan), _phased(expected)),
    )
    for table, actual_rows, wanted_rows in tables:
        for a, b in zip(actual_rows, wanted_rows, strict=False):
            if a != b:
                return f"{table} {_name(a)!r} differs from {table} {_name(b)!r} of the model"
        if len(actual_rows) != len(wanted_rows):
            return f"it has {len(actual_rows)} {table}s, expected {len(wanted_rows)}"
    return None


def _placeless(plan: Plan) -> tuple[Any, ...]:
    return tuple(replace(b, offset=0) for b in plan.buffers)


def _phased(plan: Plan) -> tuple[Any, ...]:
    """The ops of a plan, each with the number of the phase to which it belongs."""
    phase = {
        task.op: number
        for number, entry in enumerate(plan.phases)
        for tasks in entry.processors
        for task in tasks
    }
    return tuple((replace(op, params=_plain(op.params)), phase.get(op.id)) for op in plan.ops)


def _plain(value: Any) -> Any:
    """The value with lists replaced by tuples. Values that differ only in this compare as equal."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return tuple(_plain(v) for v in value) if isinstance(value, (list, tuple)) else value


def _name(row: Any) -> str:
    return str((row[0] if isinstance(row, tuple) else row).name)
