"""Part of the verifier: the operand stream, which copies operands of tasks to shared memory before
the tasks start. The copied bytes must exist, must be the bytes that the tasks read, and must not be
written by any task. Called by ark.plan.verify.structure.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

from ark.machine import Machine
from ark.machine.variant import COMMUNICATE
from ark.plan.access import Region
from ark.plan.serialize import machine_of
from ark.plan.types import (
    MAX_PIECE_PITCH_BYTES,
    MAX_PIECES,
    MAX_STAGE_PAGES,
    Fetch,
    FetchPages,
    Plan,
    PlanOp,
    pages_of_stage,
)
from ark.plan.verify.rank_set import Key, RankSet, refuse

BULK_COPY_BYTES = 16  # least size and alignment of a bulk copy


def check_streams(
    rank_set: RankSet, plan: Plan, written: set[Key], rewritten: Sequence[set[Key]]
) -> None:
    """Raises PlanError if a task writes an operand of the operand stream, or if the stream copies
    other bytes than tasks read. The operand stream copies operands to shared memory before tasks
    start.

    written: the memory that any task writes. rewritten: for each phase, the memory that tasks write
        other than by appending rows to a cache. A growing fetch (a copy of the rows that a cache
        has so far) may read memory to which tasks append, because an append never writes rows that
        the fetch copies.
    """
    for number in range(len(plan.phases)):
        machine = machine_of(plan, number)
        listed = rank_set.listing(plan.rank, number)
        regions: dict[Hashable, list[Region]] = {}
        for op_id, (nodes, coords) in listed.by_op.items():
            op, sig = plan.ops[op_id], rank_set.signatures(plan.rank)[op_id]
            fetches_of = tuple(listed.tasks[i].fetches for i in nodes.tolist())
            if fetches_of != rank_set.templates.streams(sig, coords):
                raise refuse(
                    f"the fetches of op {op.name!r} differ from those that tasks of kind "
                    f"{op.kind!r} use"
                )
            grow = any(fetch.growth for fetches in fetches_of for fetch in fetches)
            if grow and any(len(fetches) != 1 for fetches in fetches_of):
                raise refuse(
                    f"a task of op {op.name!r} has other fetches beside a growing fetch (a copy of "
                    "the rows that a cache has so far); a growing fetch must be a task's only one"
                )
            if grow and not regions:
                regions = _by_memory(rank_set.touches(plan.rank, number))
            for fetch in {fetch for fetches in fetches_of for fetch in fetches}:
                bad = written if fetch.growth is None else rewritten[number]
                _check_fetch(rank_set, plan, op, fetch, bad)
                size = fetch.stage * (1 if fetch.growth is None else 2)
                if machine.ring_bytes and size > machine.stage_bytes:
                    raise refuse(
                        f"op {op.name!r} streams stages of {size} bytes, but a stage of the ring "
                        f"has {machine.stage_bytes}"
                    )
                _check_growth(rank_set, plan, machine, op_id, fetch, regions, written)


def _by_memory(touched: Sequence[Sequence[Region]]) -> dict[Hashable, list[Region]]:
    """The memory accesses of all ops of a phase, grouped by the buffer that they access."""
    regions: dict[Hashable, list[Region]] = {}
    for region in (region for of_op in touched for region in of_op):
        regions.setdefault(region.memory, []).append(region)
    return regions


def _check_fetch(rank_set: RankSet, plan: Plan, op: PlanOp, fetch: Fetch, bad: set[Key]) -> None:
    """Raises PlanError unless the bytes that a fetch copies exist, are not in `bad` (memory that
    tasks write), and are copied in pieces whose size and alignment the hardware supports.
    """
    growth = fetch.growth
    for operand in (fetch.operand,) if growth is None else (fetch.operand, growth.beside):
        tensor = plan.tensors[op.operands[operand]]
        buffer = plan.buffers[tensor.buffer]
        room = buffer.nbytes - max(rank_set.first_bytes(tensor))
        if not buffer.initial or rank_set.buffer_of(plan.rank, buffer.id) in bad:
            raise refuse(
                f"op {op.name!r} streams {buffer.name!r}, which tasks write; expected memory that "
                "the iteration only reads"
            )
        if fetch.offset < 0 or fetch.offset + fetch.reach > room or fetch.stage <= 0:
            raise refuse(
                f"op {op.name!r} streams {fetch.reach} bytes from byte {fetch.offset} of "
                f"{buffer.name!r}, in stages of {fetch.stage} bytes, but from there the buffer "
                f"has only {room} bytes"
            )
        if growth is not None and (tensor.first_byte + fetch.offset) % BULK_COPY_BYTES:
            raise refuse(
                f"op {op.name!r} streams rows of {buffer.name!r} from byte "
                f"{tensor.first_byte + fetch.offset}, expected a multiple of {BULK_COPY_BYTES}"
            )
    if fetch.parts > 1:
        check_pieces(op.name, fetch)


def check_pieces(name: str, fetch: Fetch) -> None:
    """Raises PlanError unless the stages of a fetch consist of equal parts of whole rows, with a
    size and alignment that hardware copies support.
    """
    whole = fetch.stage == fetch.piece * fetch.rows and fetch.piece % BULK_COPY_BYTES == 0
    row = fetch.piece * fetch.parts
    if not whole or not row or fetch.nbytes % row or fetch.rows > MAX_PIECES or fetch.growth:
        raise refuse(
            f"op {name!r} streams {fetch.nbytes} bytes in stages of {fetch.stage} bytes. A stage "
            f"holds one of {fetch.parts} parts of {fetch.rows} rows, and a row has {row} bytes. "
            f"Expected: whole rows, at most {MAX_PIECES} rows in a stage, and parts of rows that "
            f"are a multiple of {BULK_COPY_BYTES} bytes"
        )
    if row >= MAX_PIECE_PITCH_BYTES:
        raise refuse(
            f"op {name!r} streams parts of rows of {row} bytes; rows must be shorter than "
            f"{MAX_PIECE_PITCH_BYTES} bytes"
        )


def _check_pages(
    rank_set: RankSet, plan: Plan, op: PlanOp, fetch: Fetch, pages: FetchPages, written: set[Key]
) -> None:
    """Raises PlanError unless the rows that one stage of the ring holds are in at most
    MAX_STAGE_PAGES pages, the distance between pages is one that hardware copies support, and no
    task writes the page numbers.
    """
    growth = fetch.growth
    assert growth is not None
    table = plan.tensors[op.operands[pages.table]]
    buffer = plan.buffers[table.buffer]
    rows, step = fetch.nbytes // growth.row, fetch.stage // growth.row
    if table.dtype != "int32" or math.prod(table.shape) * pages.rows < rows:
        raise refuse(
            f"op {op.name!r} takes page numbers from {table.name!r}, which is {table.dtype} "
            f"{list(table.shape)}; expected int32, one number for every {pages.rows} of {rows} rows"
        )
    if not buffer.initial or rank_set.buffer_of(plan.rank, buffer.id) in written:
        raise refuse(
            f"op {op.name!r} takes page numbers from {buffer.name!r}, which tasks write; "
            "expected memory that they only read"
        )
    if pages.pitch % BULK_COPY_BYTES or pages_of_stage(step, pages.rows) > MAX_STAGE_PAGES:
        raise refuse(
            f"op {op.name!r} streams stages of {step} rows from pages of {pages.rows} rows, and "
            f"the pages are {pages.pitch} bytes apart. Expected: at most {MAX_STAGE_PAGES} pages "
            f"in a stage, and a distance that is a multiple of {BULK_COPY_BYTES} bytes"
        )


def _check_growth(
    rank_set: RankSet,
    plan: Plan,
    machine: Machine,
    op_id: int,
    fetch: Fetch,
    regions: Mapping[Hashable, Sequence[Region]],
    written: set[Key],
) -> None:
    """Raises PlanError unless a growing fetch is valid. A growing fetch copies the rows that a
    cache has so far. It must copy whole rows in whole stages. Its number of rows must be in memory
    that has valid contents when the iteration begins and that no earlier op changes. regions: the
    phase's accesses by memory.
    """
    op, growth = plan.ops[op_id], fetch.growth
    if growth is None:
        return
    tensor = plan.tensors[op.operands[growth.length]]
    if machine.ring_bytes and not machine.variant.role(COMMUNICATE):
        raise refuse(
            f"op {op.name!r} has a growing fetch (a copy of the rows that a cache has so far), "
            f"but variant {machine.variant.name!r} has a ring and no warp of role {COMMUNICATE!r} "
            "to count the stages"
        )
    if tensor.dtype != "int32" or math.prod(tensor.shape) != 1:
        raise refuse(
            f"op {op.name!r} takes its number of rows from {tensor.name!r}, which is "
            f"{tensor.dtype} {list(tensor.shape)}; expected one int32"
        )
    whole = (
        fetch.stage % growth.row == fetch.nbytes % growth.row == growth.row % BULK_COPY_BYTES == 0
    )
    if not whole or growth.part >= growth.parts:
        raise refuse(
            f"op {op.name!r} streams {fetch.nbytes} bytes in stages of {fetch.stage} bytes and "
            f"takes part {growth.part} of {growth.parts}. Expected: a part number below the "
            f"number of parts, bytes and stages that are multiples of the row of {growth.row} "
            f"bytes, and rows that are a multiple of {BULK_COPY_BYTES} bytes"
        )
    if growth.pages is not None:
        _check_pages(rank_set, plan, op, fetch, growth.pages, written)
    buffer = plan.buffers[tensor.buffer]
    touching = regions.get(buffer.id, ())
    if not any(r.op == op_id and not r.write for r in touching):
        raise refuse(
            f"op {op.name!r} takes its number of rows from {buffer.name!r}, but its tasks do not "
            "read it"
        )
    if not buffer.initial or any(r.write and r.op < op_id for r in touching):
        raise refuse(
            f"op {op.name!r} takes its number of rows from {buffer.name!r}, which an earlier op of "
            "the iteration writes or which has no contents when the iteration begins"
        )


def written_memory(rank_set: RankSet, number: int, appended: bool = True) -> set[Key]:
    """All memory, as (rank, buffer), that tasks of a phase write, derived from the checked ranks.
    appended: True to include memory that tasks write only by appending rows.
    """
    written = set()
    for plan in rank_set.checked_plans:
        for region in (r for op in rank_set.touches(plan.rank, number) for r in op if r.write):
            if region.boxes.append_only and not appended:
                continue
            owner, buffer = rank_set.buffer_of(plan.rank, int(region.memory))  # type: ignore[call-overload]
            renamings = zip(rank_set.symmetry.twin, rank_set.symmetry.renaming, strict=True)
            written |= {(new[owner], buffer) for twin, new in renamings if twin == plan.rank}
    return written
