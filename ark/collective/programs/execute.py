"""Runs a program over ranks that are NumPy arrays in one process. Tests compare the result with
`reference_result`, which computes the collective directly, without a program. For integers the two
results have the same bits. A seed selects one of the many valid orders of operations, which can
reveal a missing dependency.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np

from ark.collective.programs.order import describe
from ark.collective.programs.reductions import REDUCTIONS, blend, divided, dot_products, reference
from ark.collective.programs.types import (
    Collective,
    CollectiveProgram,
    Counts,
    Kind,
    Operation,
    OpRef,
    Span,
)
from ark.errors import InvalidUsageError, PlanError

Memory = list[dict[str, list[np.ndarray | None]]]


def execute(
    program: CollectiveProgram, inputs: Sequence[np.ndarray], seed: int | None = None
) -> list[np.ndarray | None]:
    """Returns the `out` array of every rank.

    Args: program: a program that `check` accepts. inputs: one 1-D array per rank, all of one length
    and dtype; broadcast reads only the root's. For an all-to-all with counts, lengths are
    proportional to the ranks' counts. For reduce_scatter and all_to_all the length must be a
    multiple of the number of ranks. For other collectives any length works, even one below the
    number of chunks. seed: with None, operations run in the order in which they become ready; with
    a number, the next operation is selected at random, reproducibly, among the ready ones.

    Returns: 1-D arrays; None on ranks whose `out` the collective does not define (reduce, except on
    the root).

    Raises: InvalidUsageError: inputs do not fit. PlanError: the program cannot run to its end.
    """
    _check_inputs(program, inputs)
    pieces = []
    for piece in range(program.pieces):
        memory = _load(program, inputs, piece)
        _run(program, memory, None if seed is None else random.Random(seed + piece))
        pieces.append(memory)
    return [_store(program, pieces, rank) for rank in range(program.ranks)]


def reference_result(
    collective: Collective | str,
    inputs: Sequence[np.ndarray],
    reduction: str = "sum",
    root: int | None = None,
    counts: Counts | None = None,
) -> list[np.ndarray | None]:
    """The expected result of every rank, computed directly from all ranks' inputs."""
    collective, ranks = Collective(collective), len(inputs)
    if collective is Collective.ALL_GATHER:
        return [np.concatenate(inputs) for _ in range(ranks)]
    if collective is Collective.BROADCAST:
        return [inputs[root or 0].copy() for _ in range(ranks)]
    if collective is Collective.ALL_TO_ALL:
        rows = counts or ((1,) * ranks,) * ranks
        shards = [
            np.split(array, [len(array) * end // max(1, sum(row)) for end in np.cumsum(row)[:-1]])
            for array, row in zip(inputs, rows, strict=True)
        ]
        return [np.concatenate([shards[s][r] for s in range(ranks)]) for r in range(ranks)]
    total = reference(reduction, inputs)
    if collective is Collective.REDUCE_SCATTER:
        return list(np.split(total, ranks))
    if collective is Collective.REDUCE:
        return [total if rank == root else None for rank in range(ranks)]
    return [total.copy() for _ in range(ranks)]


def _check_inputs(program: CollectiveProgram, inputs: Sequence[np.ndarray]) -> None:
    if program.counts is not None:
        sent = [sum(row) for row in program.counts]
        unit = max(map(len, inputs), default=0) // max(sent)
        if [len(array) for array in inputs] != [number * unit for number in sent]:
            raise InvalidUsageError(
                f"{program.name} needs one array per rank in the proportions {sent}, but got "
                f"{[len(array) for array in inputs]} elements."
            )
        return
    shapes = {(array.shape, array.dtype) for array in inputs}
    if len(inputs) != program.ranks or len(shapes) != 1 or inputs[0].ndim != 1:
        raise InvalidUsageError(
            f"{program.name} needs {program.ranks} one-dimensional arrays of one length and dtype, "
            f"but got {len(inputs)}: {sorted((str(s), str(d)) for s, d in shapes)[:4]}."
        )
    dealt = program.collective in (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)
    if dealt and len(inputs[0]) % program.ranks:
        raise InvalidUsageError(
            f"{program.collective.value} divides {len(inputs[0])} elements among {program.ranks} "
            f"ranks; pad them to a multiple of {program.ranks}."
        )


def _cut(array: np.ndarray, parts: int) -> list[np.ndarray]:
    """Cuts an array into `parts` contiguous parts whose lengths differ by at most one."""
    bounds = [len(array) * i // parts for i in range(parts + 1)]
    return [array[a:b] for a, b in itertools.pairwise(bounds)]


def _load(program: CollectiveProgram, inputs: Sequence[np.ndarray], piece: int) -> Memory:
    memory: Memory = [{b.name: [None] * b.slots for b in program.buffers} for _ in inputs]
    dealt = program.collective in (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)
    slots = program.buffer_by_name["in"].slots
    if program.counts is not None:
        for rank, row in enumerate(program.counts):
            chunks = _cut(inputs[rank], sum(row)) if any(row) else []
            kept = [_cut(chunk, program.pieces)[piece].copy() for chunk in chunks]
            memory[rank]["in"][: len(kept)] = kept
        return memory
    for rank, array in enumerate(inputs):
        if program.collective is Collective.BROADCAST and rank != program.root:
            continue
        shards = np.split(array, program.ranks) if dealt else [array]
        chunks = [c for shard in shards for c in _cut(shard, slots // len(shards))]
        memory[rank]["in"] = [_cut(chunk, program.pieces)[piece].copy() for chunk in chunks]
    return memory


def _store(program: CollectiveProgram, pieces: list[Memory], rank: int) -> np.ndarray | None:
    if program.collective is Collective.REDUCE and rank != program.root:
        return None
    parts = []
    slots = program.buffer_by_name["out"].slots
    if program.counts is not None:
        slots = sum(row[rank] for row in program.counts)
        if not slots:
            return np.empty(0)
    for slot in range(slots):
        for memory in pieces:
            part = memory[rank]["out"][slot]
            if part is None:
                raise PlanError(
                    f"{program.name} ended, but nothing arrived in out[{slot}] of rank {rank}."
                )
            parts.append(part)
    return np.concatenate(parts)


def _run(program: CollectiveProgram, memory: Memory, rng: random.Random | None) -> None:
    missing = {ref: len(set(program.op(ref).deps)) for ref in program.refs()}
    followers: dict[OpRef, list[OpRef]] = {}
    for ref in missing:
        for dep in set(program.op(ref).deps):
            followers.setdefault(dep, []).append(ref)
    ready = [ref for ref, count in missing.items() if count == 0]
    done = 0
    while ready:
        ref = ready.pop(rng.randrange(len(ready)) if rng else 0)
        _step(program, memory, ref)
        done += 1
        for follower in sorted(followers.get(ref, ())):
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    if done < len(missing):
        raise PlanError(f"{program.name} deadlocks: {len(missing) - done} operations never start.")


def _read(program: CollectiveProgram, memory: Memory, ref: OpRef, span: Span) -> list[np.ndarray]:
    column = [memory[ref.rank][span.buffer][slot] for slot in span.slots()]
    if any(part is None for part in column):
        raise PlanError(f"{describe(program, ref)} reads {span}, where nothing has arrived.")
    return [part for part in column if part is not None]


def _step(program: CollectiveProgram, memory: Memory, ref: OpRef) -> None:
    op = program.op(ref)
    columns = [_read(program, memory, ref, span) for span in op.srcs]
    if op.kind is Kind.DOT:
        result = [dot_products(np.concatenate(columns[0]), np.concatenate(columns[1]))]
    elif op.kind is Kind.BLEND:
        a, b, (dots,) = columns
        result = [blend(op.reduce or "", x, y, dots) for x, y in zip(a, b, strict=True)]
    elif op.kind is Kind.REDUCE:
        result = _fold(op, columns)
    else:
        result = [part.copy() for part in columns[0]]
    target = memory[op.writes_on(ref.rank)][op.dst.buffer]
    for slot, part in zip(op.dst.slots(), result, strict=True):
        target[slot] = part


def _fold(op: Operation, columns: list[list[np.ndarray]]) -> list[np.ndarray]:
    reduction = REDUCTIONS[op.reduce or "sum"]
    if reduction.elementwise:
        total = columns[0]
        for column in columns[1:]:
            total = [reduction.combine(a, b) for a, b in zip(total, column, strict=True)]
        return [divided(part, op.divide) for part in total]
    whole = np.concatenate(columns[0])
    for column in columns[1:]:
        whole = reduction.combine(whole, np.concatenate(column))
    return np.split(whole, np.cumsum([len(part) for part in columns[0]])[:-1])
