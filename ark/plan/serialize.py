"""Reads and writes plans as JSON. Equal plans give equal bytes. Fields are checked when a plan is
read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ark.errors import PlanError
from ark.machine import Machine
from ark.plan import schema
from ark.plan.schema import FORMAT_NUMBER
from ark.plan.types import Fetch, Plan, PlanOp, Task


def machine_of(plan: Plan, phase: int | None = None) -> Machine:
    """The machine model for which a plan was created. Raises PlanError if the entry is invalid.

    phase: the number of a phase; the model then has only the kernel variant under which this phase
        runs. By default it has all variants that the plan uses.
    """
    machine = schema.read_machine(plan.machine)
    return machine if phase is None else machine.under(plan.phases[phase].variant)


def machine_entry(machine: Machine) -> dict[str, Any]:
    """A machine model as JSON-compatible values, as a plan stores it. `machine_of` reads it."""
    entry = dataclasses.asdict(machine)
    entry["capabilities"] = [c.value for c in machine.capabilities]
    return {name: _listed(value) for name, value in entry.items()}


def _listed(value: Any) -> Any:
    """The value with tuples replaced by lists, as in JSON."""
    if isinstance(value, dict):
        return {name: _listed(inner) for name, inner in value.items()}
    return [_listed(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON-compatible values."""
    return {
        "format": FORMAT_NUMBER,
        "rank": plan.rank,
        "world_size": plan.world_size,
        "machine": dict(plan.machine),
        "meta": dict(plan.meta),
        "arenas": dict(plan.arenas),
        "buffers": [
            [b.name, b.arena, b.nbytes, b.offset, b.rank, int(b.initial)] for b in plan.buffers
        ],
        "tensors": [
            [
                t.name,
                t.dtype,
                list(t.shape),
                list(t.extents),
                list(t.offsets),
                t.buffer,
                int(t.packet),
            ]
            for t in plan.tensors
        ],
        "ops": [_op(o) for o in plan.ops],
        "counters": [[c.name, c.step, c.rank, int(c.system)] for c in plan.counters],
        "phases": [
            {
                "name": p.name,
                "variant": p.variant,
                "processors": [[_task(t) for t in tasks] for tasks in p.processors],
            }
            for p in plan.phases
        ],
    }


def _op(op: PlanOp) -> list[Any]:
    row: list[Any] = [op.name, op.kind, dict(op.params), list(op.operands), list(op.after)]
    return row if op.claims is None else [*row, op.claims]


def _task(task: Task) -> list[Any]:
    return [
        task.op,
        list(task.coord),
        [list(w) for w in task.waits],
        list(task.signals),
        [_fetch(f) for f in task.fetches],
    ]


def _fetch(fetch: Fetch) -> list[Any]:
    row: list[Any] = [fetch.operand, fetch.offset, fetch.nbytes, fetch.stage]
    g = fetch.growth
    if fetch.parts > 1:
        return [*row, None, fetch.rows, fetch.parts]
    if g is None:
        return row
    p = g.pages
    more: list[Any] = [] if p is None else [[p.table, p.rows, p.pitch, p.count]]
    if g.window:
        more = [more[0] if more else None, g.window]
    return [*row, [g.length, g.row, g.part, g.parts, g.beside, *more]]


def to_json(plan: Plan) -> str:
    """The plan as JSON, with one line per task and keys in a fixed order."""
    data = to_dict(replace(plan, phases=tuple(replace(p, processors=()) for p in plan.phases)))
    phases = data.pop("phases")
    head = json.dumps(data, separators=(",", ":"))[:-1]
    encode = msgspec.json.encode  # same text as json.dumps, ten times faster
    parts = []
    for scheduled, phase in zip(plan.phases, phases, strict=True):
        lists = ",\n".join(
            "[\n" + ",\n".join([encode(_task(t)).decode() for t in tasks]) + "]" if tasks else "[]"
            for tasks in scheduled.processors
        )
        head_of = f'"name":{json.dumps(phase["name"])},"variant":{phase["variant"]}'
        parts.append(f'{{{head_of},"processors":[\n{lists}\n]}}')
    return head + ',"phases":[' + ",".join(parts) + "]}\n"


def from_json(text: str) -> Plan:
    """Reads a plan. Raises PlanError with the first fault. Does not verify the plan."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"not a valid plan: {error}; `ark plan -o FILE` writes plans as JSON"
        ) from error
    return from_dict(data)


def from_dict(data: Mapping[str, Any]) -> Plan:
    """Reads a plan from JSON-compatible values. Raises PlanError with the first fault."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT_NUMBER:
        raise PlanError(
            f"not a plan of format {FORMAT_NUMBER} (found {_description(data)}); "
            "create it with `ark plan`"
        )
    plan = schema.read(data)
    machine_of(plan)
    return plan


def _description(data: Any) -> str:
    if data is None:
        return "null"
    if isinstance(data, Mapping):
        return f"format {data.get('format')!r}"
    return type(data).__name__
