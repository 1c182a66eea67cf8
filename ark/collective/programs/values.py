"""Converts a program to values, which need less synchronisation than slots. In a program a slot can
be overwritten, and the writer must wait until no peer reads the old data. A value is the result of
one write to one slot and is never overwritten, so only dependencies that carry data remain. A copy
creates no value: readers of the copy read the source. Values on which the result does not depend
are omitted. Used by the plan's lowering.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from ark.collective.programs.order import in_order
from ark.collective.programs.types import CollectiveProgram, Kind, Role, Span


class Origin(Enum):
    """The kinds of writes that create a value."""

    INPUT = "input"
    PUT = "put"
    REDUCE = "reduce"


@dataclass(frozen=True)
class Value:
    """The result of one write to one slot, or the initial content of a slot of `in`.

    number: the value's number, equal on all ranks. rank: the rank that holds the value. writer: the
    rank that wrote it; for a put, this is another rank. part: the index of the value's part within
    the share of a rank; only values with the same part are combined. slot: if the value is an
    input, its slot in the buffer `in`. sources: the numbers of the values that are combined, in
    order. reduce, divide: the reduction that combines them, and the divisor of its result.
    """

    number: int
    origin: Origin
    rank: int
    writer: int
    part: int
    slot: int = -1
    sources: tuple[int, ...] = ()
    reduce: str = ""
    divide: int = 1


@dataclass(frozen=True)
class Flow:
    """The values on which the result depends.

    parts: the number of parts of a share. A share is the data that one rank owns, or all data if it
    is not divided among ranks. values: by number, in an order that is valid for all ranks; a rank's
    own values are in the order of its list. final: for each (rank, slot) of `out`, the value at the
    end.
    """

    parts: int
    values: Mapping[int, Value]
    final: Mapping[tuple[int, int], Value]


def flow(program: CollectiveProgram) -> Flow:
    """Computes the values of a checked program, whose operations are puts, copies and
    reductions.
    """
    divided = program.collective.sharded and program.counts is None
    parts = program.shard if divided else program.chunks
    values: list[Value] = []
    holds: dict[tuple[int, str, int], Value] = {}

    def add(origin: Origin, rank: int, writer: int, part: int, **more: object) -> Value:
        values.append(Value(len(values), origin, rank, writer, part, **more))  # type: ignore[arg-type]
        return values[-1]

    for rank in range(program.ranks):
        for slot in range(program.buffer_by_name["in"].slots):
            holds[rank, "in", slot] = add(Origin.INPUT, rank, rank, slot % parts, slot=slot)
    for ref in in_order(program):
        op = program.op(ref)
        owner = op.writes_on(ref.rank)
        origin = Origin.PUT if op.kind is Kind.PUT else Origin.REDUCE
        written = []
        for column in range(op.dst.count):
            sources = [holds[ref.rank, span.buffer, span.start + column] for span in op.srcs]
            if op.kind is Kind.COPY:
                written.append(sources[0])
                continue
            numbers = tuple(value.number for value in sources)
            how = {"reduce": op.reduce or "", "divide": op.divide}
            written.append(add(origin, owner, ref.rank, sources[0].part, sources=numbers, **how))
        for slot, value in zip(op.dst.slots(), written, strict=True):
            holds[owner, op.dst.buffer, slot] = value
    final = {(rank, slot): v for (rank, buffer, slot), v in holds.items() if buffer == "out"}
    needed = {value.number for value in final.values()}
    for value in reversed(values):
        if value.number in needed:
            needed.update(value.sources)
    return Flow(parts, {v.number: v for v in values if v.number in needed}, final)


def coarsened(program: CollectiveProgram) -> CollectiveProgram:
    """Returns the program with adjacent slots merged, as far as all of its operations allow.

    For example, if every operation accesses slots 0 and 1 together, they become one slot, and a put
    of both becomes a single write. Programs with slots of dot products are returned unchanged.
    """
    if any(buffer.role is Role.DOTS for buffer in program.buffers):
        return program
    spans = [s for ops in program.operations for op in ops for s in (op.dst, *op.srcs)]
    divisor = math.gcd(
        program.shard if program.collective.sharded and not program.counts else program.chunks,
        *(buffer.slots for buffer in program.buffers),
        *(number for span in spans for number in (span.start, span.count)),
        *(number for row in program.counts or () for number in row),
    )
    if divisor == 1:
        return program

    def shrunk(span: Span) -> Span:
        return Span(span.buffer, span.start // divisor, span.count // divisor)

    return replace(
        program,
        chunks=program.chunks // divisor,
        counts=program.counts and tuple(tuple(n // divisor for n in r) for r in program.counts),
        buffers=tuple(replace(b, slots=b.slots // divisor) for b in program.buffers),
        operations=tuple(
            tuple(replace(op, dst=shrunk(op.dst), srcs=tuple(map(shrunk, op.srcs))) for op in ops)
            for ops in program.operations
        ),
    )
