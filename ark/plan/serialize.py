"""Plans as JSON: the same plan gives the same bytes; what is read is checked before it is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ark.errors import PlanError
from ark.machine import Machine
from ark.plan.types import (
    Fetch,
    Phase,
    Plan,
    PlanBuffer,
    PlanCounter,
    PlanOp,
    PlanTensor,
    Task,
)
from ark.variant import Role, Variant

FORMAT = 1


def machine_of(plan: Plan) -> Machine:
    """The machine model that a plan was made for."""
    fields = dict(plan.machine)
    fields["capabilities"] = tuple(fields.get("capabilities", ()))
    fields["tile"] = tuple(fields.get("tile", (64, 64)))
    fields["variants"] = tuple(_variant(v) for v in fields["variants"])
    return Machine(**fields)


def _variant(entry: Mapping[str, Any]) -> Variant:
    roles = tuple(Role(**role) for role in entry["roles"])
    return Variant(**{**entry, "roles": roles})


def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON-able values."""
    return {
        "format": FORMAT,
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
        "ops": [
            [o.name, o.kind, dict(o.params), list(o.operands), list(o.after)] for o in plan.ops
        ],
        "counters": [[c.name, c.step, c.rank, int(c.system)] for c in plan.counters],
        "phases": [
            {"name": p.name, "processors": [[_task(t) for t in tasks] for tasks in p.processors]}
            for p in plan.phases
        ],
    }


def _task(task: Task) -> list[Any]:
    return [
        task.op,
        list(task.coord),
        [list(w) for w in task.waits],
        list(task.signals),
        [[f.operand, f.offset, f.nbytes, f.stage] for f in task.fetches],
    ]


def to_json(plan: Plan) -> str:
    """One line per task, keys in a fixed order."""
    data = to_dict(plan)
    phases = data.pop("phases")
    head = json.dumps(data, separators=(",", ":"))[:-1]
    parts = []
    for phase in phases:
        lists = ",\n".join(
            "[\n" + ",\n".join(json.dumps(t, separators=(",", ":")) for t in tasks) + "]"
            if tasks
            else "[]"
            for tasks in phase["processors"]
        )
        parts.append(f'{{"name":{json.dumps(phase["name"])},"processors":[\n{lists}\n]}}')
    return head + ',"phases":[' + ",".join(parts) + "]}\n"


def from_json(text: str) -> Plan:
    """Reads a plan; PlanError says what is wrong with it. It is not verified here."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"this is no plan: {error}; a plan is the JSON that `ark plan -o FILE` writes"
        ) from error
    return from_dict(data)


def from_dict(data: Mapping[str, Any]) -> Plan:
    """Reads a plan from JSON-able values; PlanError says what is wrong with it."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise PlanError(
            f"this is no plan of format {FORMAT} (found {_found(data)}); make it with `ark plan`"
        )
    try:
        plan = Plan(
            rank=int(data["rank"]),
            world_size=int(data["world_size"]),
            machine=dict(data["machine"]),
            meta=dict(data["meta"]),
            arenas={str(k): int(v) for k, v in data["arenas"].items()},
            buffers=tuple(
                PlanBuffer(i, str(n), str(a), int(size), int(at), int(r), bool(init))
                for i, (n, a, size, at, r, init) in enumerate(data["buffers"])
            ),
            tensors=tuple(
                PlanTensor(i, str(n), str(d), _ints(s), _ints(e), _ints(o), int(b), bool(p))
                for i, (n, d, s, e, o, b, p) in enumerate(data["tensors"])
            ),
            ops=tuple(
                PlanOp(i, str(n), str(k), dict(params), _ints(operands), _ints(after))
                for i, (n, k, params, operands, after) in enumerate(data["ops"])
            ),
            counters=tuple(
                PlanCounter(i, str(n), int(step), int(r), bool(system))
                for i, (n, step, r, system) in enumerate(data["counters"])
            ),
            phases=tuple(
                Phase(
                    str(p["name"]),
                    tuple(tuple(_read_task(t) for t in tasks) for tasks in p["processors"]),
                )
                for p in data["phases"]
            ),
        )
        machine_of(plan)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(
            f"the plan is damaged: {type(error).__name__}: {error}; make it again with `ark plan`"
        ) from error
    return plan


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


def _read_task(row: Any) -> Task:
    op, coord, waits, signals, fetches = row
    return Task(
        int(op),
        _ints(coord),
        tuple((int(c), int(v)) for c, v in waits),
        _ints(signals),
        tuple(Fetch(int(o), int(at), int(n), int(s)) for o, at, n, s in fetches),
    )


def _found(data: Any) -> str:
    if isinstance(data, Mapping):
        return f"format {data.get('format')!r}"
    return type(data).__name__
