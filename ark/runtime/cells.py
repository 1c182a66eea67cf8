"""Finds the words of a plan's task table that must change when memory moves. The task table is the
array of tasks that the kernel reads. It contains addresses in external buffers, which change if a
caller passes other memory. It also contains addresses of box maps (tensor maps for TMA),
because each copy of the table has its own box maps. Called by ark.runtime.device_tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ark.backend.codegen import layout
from ark.backend.codegen.body import BoxMap
from ark.plan.types import Fetch, Plan
from ark.runtime.tables import Tables, stream_boxes


def cells(plan: Plan, built: Tables) -> dict[int, np.ndarray | None]:
    """For each external buffer, the indices of the 64-bit words in `tasks` with addresses in the
    buffer. The value is None if tables other than `tasks` contain such addresses too; then all
    tables must be rebuilt when the buffer moves.
    """
    of_op: dict[int, list[tuple[int, int]]] = {}
    words_of: dict[int, list[np.ndarray] | None] = {}
    external = {b.id for b in plan.buffers if b.arena == "external"}
    for op in plan.ops:
        for place, tensor in enumerate(op.operands):
            buffer = plan.tensors[tensor].buffer
            if buffer in external:
                of_op.setdefault(op.id, []).append((place, buffer))
                words_of.setdefault(buffer, [])
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
            listed = words_of[buffer]
            if listed_apart or (op_id, place) in fetched:
                words_of[buffer] = None
            elif listed is not None:
                listed.append(tasks * size + first + place)
    return {b: None if c is None else np.concatenate(c) for b, c in words_of.items()}


def map_cells(plan: Plan, built: Tables, box_maps: Sequence[Sequence[BoxMap]]) -> np.ndarray:
    """The indices of the 64-bit words in `tasks` that are addresses of box maps (tensor maps
    for TMA).
    """
    first, size = _operand_words()
    tasks_of, streamed = _tasks_of(plan, built), stream_boxes(plan)
    indices = [
        tasks_of[op.id] * size + first + len(op.operands) + place
        for op, maps in zip(plan.ops, box_maps, strict=True)
        if op.id not in streamed
        for place in range(len(maps))
    ]
    return np.concatenate(indices) if indices else np.zeros(0, np.int64)


def _operand_words() -> tuple[int, int]:
    """The offset of the operands in a task's record, and the length of the record, both in 64-bit
    words.
    """
    kind = layout.dtype("ArkTask")
    fields = kind.fields
    assert fields is not None
    return fields["operand"][1] // 8, kind.itemsize // 8


def _tasks_of(plan: Plan, built: Tables) -> list[np.ndarray]:
    """For each op of the plan, the indices of its tasks' records in the task table."""
    rows = np.argsort(built.tasks["op"], kind="stable")
    bounds = np.searchsorted(built.tasks["op"][rows], np.arange(len(plan.ops) + 1))
    return [rows[bounds[op.id] : bounds[op.id + 1]] for op in plan.ops]


def _fetched(fetch: Fetch) -> tuple[int, ...]:
    """The indices of the operands to which the addresses in a fetch's records refer."""
    if fetch.growth is None:
        return (fetch.operand,)
    pages = fetch.growth.pages
    tables = () if pages is None else (pages.table,)
    return fetch.operand, fetch.growth.beside, fetch.growth.length, *tables
