"""Which words of a plan's table of tasks hold addresses of what may move: external buffers, which
lie elsewhere when a caller gives other memory, and box maps, of which each copy of the table has
its own. Called by ark.runtime.device_tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ark.codegen import layout
from ark.codegen.dialect import BoxMap
from ark.plan.types import Fetch, Plan
from ark.runtime.tables import Tables, stream_boxes


def cells(plan: Plan, built: Tables) -> dict[int, np.ndarray | None]:
    """By external buffer: which 64-bit words of `tasks` hold addresses in it, so that it can be
    moved; None where other tables hold some too, which must be built again. Box maps of it, whose
    addresses are in tasks' records, are the caller's to make anew (map_cells).
    """
    of_op: dict[int, list[tuple[int, int]]] = {}
    found: dict[int, list[np.ndarray] | None] = {}
    external = {b.id for b in plan.buffers if b.arena == "external"}
    for op in plan.ops:
        for place, tensor in enumerate(op.operands):
            buffer = plan.tensors[tensor].buffer
            if buffer in external:
                of_op.setdefault(op.id, []).append((place, buffer))
                found.setdefault(buffer, [])
    first, size = _operand_words()
    tasks_of = _tasks_of(plan, built)
    fetched = {
        (task.op, operand)
        for phase in plan.phases
        for tasks in phase.processors
        for task in tasks
        for fetch in task.fetches
        for operand in _fetched(fetch)
    }
    for op_id, places in of_op.items():
        listed_apart = len(plan.ops[op_id].operands) > layout.RECORD_OPERANDS
        tasks = tasks_of[op_id]
        for place, buffer in places:
            listed = found[buffer]
            if listed_apart or (op_id, place) in fetched:
                found[buffer] = None
            elif listed is not None:
                listed.append(tasks * size + first + place)
    return {b: None if c is None else np.concatenate(c) for b, c in found.items()}


def map_cells(plan: Plan, built: Tables, box_maps: Sequence[Sequence[BoxMap]]) -> np.ndarray:
    """Which 64-bit words of `tasks` hold addresses of box maps."""
    first, size = _operand_words()
    tasks_of, streamed = _tasks_of(plan, built), stream_boxes(plan)
    found = [
        tasks_of[op.id] * size + first + len(op.operands) + place
        for op, maps in zip(plan.ops, box_maps, strict=True)
        if op.id not in streamed
        for place in range(len(maps))
    ]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _operand_words() -> tuple[int, int]:
    """Of a task's record, in 64-bit words: where its operands begin, and how long it is."""
    kind = layout.dtype("ArkTask")
    fields = kind.fields
    assert fields is not None
    return fields["operand"][1] // 8, kind.itemsize // 8


def _tasks_of(plan: Plan, built: Tables) -> list[np.ndarray]:
    """By op, the places of its tasks in the table."""
    rows = np.argsort(built.tasks["op"], kind="stable")
    bounds = np.searchsorted(built.tasks["op"][rows], np.arange(len(plan.ops) + 1))
    return [rows[bounds[op.id] : bounds[op.id + 1]] for op in plan.ops]


def _fetched(fetch: Fetch) -> tuple[int, ...]:
    """The operands whose addresses a fetch's records hold."""
    if fetch.growth is None:
        return (fetch.operand,)
    return fetch.operand, fetch.growth.beside, fetch.growth.length
