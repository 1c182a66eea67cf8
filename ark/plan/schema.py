"""The schema of a plan file: its fields, their types and ranges.

A plan is data. All values in a file are converted to these types before use, unknown fields are
refused, numbers are bounded and names cannot contain control characters. The verifier checks that
the parts are consistent with each other; a task kind checks its parameters and operands
(ark.tasks).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ark.errors import InvalidUsageError, PlanError
from ark.ir import json_reader
from ark.ir.dtype import ALL, ROW_NAME, by_name
from ark.ir.json_reader import Closed
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.variant import COMPUTE
from ark.plan.types import (
    MAX_OPERANDS,
    MAX_PIECES,
    Fetch,
    FetchPages,
    Growth,
    Phase,
    Plan,
    PlanBuffer,
    PlanCounter,
    PlanOp,
    PlanTensor,
    Task,
)

FORMAT_NUMBER = 1

Name = Annotated[str, Meta(max_length=512, pattern=r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*$")]
Index = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Rank = Annotated[int, Meta(ge=0, le=1 << 12)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 44)]
Offset = Annotated[int, Meta(ge=-1, le=1 << 44)]
Flag = Annotated[int, Meta(ge=0, le=1)]
Sizes = Annotated[tuple[Annotated[int, Meta(ge=1, le=(1 << 31) - 1)], ...], Meta(max_length=8)]
Offsets = Annotated[tuple[Index, ...], Meta(max_length=8)]
Operands = Annotated[tuple[Index, ...], Meta(max_length=MAX_OPERANDS)]
Coordinates = Annotated[tuple[Index, ...], Meta(max_length=6)]
TYPES = rf"^(?:{'|'.join(t.name for t in ALL)}|{ROW_NAME})$"
Arena = Literal["activation", "parameter", "state", "external", "symmetric", "host", "packet"]


class _Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base class of entries of the plan file that are stored as lists of fixed length."""


class BufferRow(_Row, frozen=True):
    name: Name
    arena: Arena
    nbytes: Annotated[int, Meta(ge=1, le=1 << 44)]
    offset: Offset
    rank: Rank
    initial: Flag


class TensorRow(_Row, frozen=True):
    name: Name
    dtype: Annotated[str, Meta(pattern=TYPES)]
    shape: Sizes
    extents: Sizes
    offsets: Offsets
    buffer: Index
    packet: Flag


class OpRow(_Row, frozen=True):
    name: Name
    kind: Name
    params: dict[Name, Any]
    operands: Operands
    after: tuple[Index, ...]
    claims: Index | None = None


class CounterRow(_Row, frozen=True):
    name: Name
    step: Index
    rank: Rank
    system: Flag


class FetchPagesRow(_Row, frozen=True):
    table: Index
    rows: Annotated[int, Meta(ge=1, le=1 << 16)]
    pitch: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
    count: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]


class GrowthRow(_Row, frozen=True):
    length: Index
    row: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
    part: Index
    parts: Annotated[int, Meta(ge=1, le=1 << 16)]
    beside: Index
    pages: FetchPagesRow | None = None
    window: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0


class FetchRow(_Row, frozen=True):
    operand: Index
    offset: Bytes
    nbytes: Annotated[int, Meta(ge=1, le=1 << 44)]
    stage: Annotated[int, Meta(ge=1, le=1 << 31)]
    growth: GrowthRow | None = None
    rows: Annotated[int, Meta(ge=1, le=MAX_PIECES)] = 1
    parts: Annotated[int, Meta(ge=1, le=1 << 16)] = 1


class TaskRow(_Row, frozen=True):
    op: Index
    coord: Coordinates
    waits: tuple[tuple[Index, Index], ...]
    signals: tuple[Index, ...]
    fetches: tuple[FetchRow, ...]


class PhaseEntry(Closed, frozen=True):
    name: Name
    processors: tuple[tuple[TaskRow, ...], ...]
    variant: Index = 0


class PackingEntry(Closed, frozen=True):
    """A parameter packed from several others: see ark.plan.packing."""

    name: Name
    parts: tuple[tuple[Name, Index], ...]
    interleave: bool


class MetaEntry(Closed, frozen=True, omit_defaults=True):
    """Metadata of a plan. processor_ranges: for each op, the range of processors that the user set.
    contexts: for each op, the PlannerContext in which it was created. hosts: for each rank, a
    number that is equal for ranks on one host. engines: for each collective, a list of sizes with
    the engine that was measured as fastest for each algorithm. pages: the number of pages of keys
    and values; page: the number of positions in a page. sampling: "full" if the plan supports all
    of ark.SamplingParams. fresh: the names of external buffers whose memory overlaps that of no
    other buffer, as that of results which are allocated for each call. external_alignment: see
    ark.plan.signature.
    """

    model: Name | None = None
    context: Index | None = None
    chunk: Index | None = None
    batch: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    packing: tuple[PackingEntry, ...] | None = None
    processor_ranges: tuple[tuple[Index, Index] | None, ...] | None = None
    contexts: tuple[Index | None, ...] | None = None
    hosts: tuple[Index, ...] | None = None
    engines: dict[Name, tuple[tuple[Bytes, dict[Name, Name]], ...]] | None = None
    pages: Index | None = None
    page: Index | None = None
    sampling: Literal["full"] | None = None
    fresh: tuple[Name, ...] | None = None
    external_alignment: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None


class PlanFile(Closed, frozen=True):
    format: Literal[1]
    rank: Rank
    world_size: Annotated[int, Meta(ge=1, le=1 << 12)]
    machine: dict[Name, Any]
    meta: MetaEntry
    arenas: dict[Arena, Bytes]
    buffers: tuple[BufferRow, ...]
    tensors: tuple[TensorRow, ...]
    ops: tuple[OpRow, ...]
    counters: tuple[CounterRow, ...]
    phases: Annotated[tuple[PhaseEntry, ...], Meta(min_length=1)]


def read(data: Any) -> Plan:
    """A plan from JSON-compatible values. Raises PlanError with the first fault."""
    try:
        file = json_reader.read(data, PlanFile, "it")
    except json_reader.FormError as error:
        raise PlanError(
            f"the plan is damaged: {error.message}; create it again with `ark plan`"
        ) from error
    return Plan(
        rank=file.rank,
        world_size=file.world_size,
        machine=dict(file.machine),
        meta=dict(data["meta"]),
        arenas={str(name): size for name, size in file.arenas.items()},
        buffers=tuple(
            PlanBuffer(i, b.name, b.arena, b.nbytes, b.offset, b.rank, bool(b.initial))
            for i, b in enumerate(file.buffers)
        ),
        tensors=tuple(
            PlanTensor(i, t.name, _type(t), t.shape, t.extents, t.offsets, t.buffer, bool(t.packet))
            for i, t in enumerate(file.tensors)
        ),
        ops=tuple(
            PlanOp(i, o.name, o.kind, o.params, o.operands, o.after, o.claims)
            for i, o in enumerate(file.ops)
        ),
        counters=tuple(
            PlanCounter(i, c.name, c.step, c.rank, bool(c.system))
            for i, c in enumerate(file.counters)
        ),
        phases=tuple(
            Phase(
                p.name, tuple(tuple(_task(t) for t in tasks) for tasks in p.processors), p.variant
            )
            for p in file.phases
        ),
    )


def _type(row: TensorRow) -> str:
    """The name of a tensor's type. Raises PlanError if the type does not exist."""
    try:
        return by_name(row.dtype).name
    except InvalidUsageError as error:
        raise PlanError(f"the plan is damaged: tensor {row.name!r}: {error}") from error


def _task(row: TaskRow) -> Task:
    return Task(row.op, row.coord, row.waits, row.signals, tuple(map(_fetch, row.fetches)))


def _fetch(row: FetchRow) -> Fetch:
    g = row.growth
    if g is None:
        return Fetch(row.operand, row.offset, row.nbytes, row.stage, None, row.rows, row.parts)
    p = g.pages
    pages = None if p is None else FetchPages(p.table, p.rows, p.pitch, p.count)
    growth = Growth(g.length, g.row, g.part, g.parts, g.beside, pages, g.window)
    return Fetch(row.operand, row.offset, row.nbytes, row.stage, growth, row.rows, row.parts)


def read_machine(fields: Mapping[str, Any], subject: str = "the plan's machine") -> Machine:
    """The machine model that a file describes. Raises PlanError for unknown fields, wrong types and
    values out of range. subject: the words with which an error begins.
    """
    try:
        machine = json_reader.read(dict(fields), Machine, "it")
    except json_reader.FormError as error:
        reason = _unknown_capability(fields) or error.message
        raise PlanError(f"{subject} is damaged: {reason}") from error
    fault = ""
    if unknown := _unknown(machine, fields):
        fault = f"it has no field {unknown!r}"
    elif not machine.variants or any(not v.role(COMPUTE) or v.warps > 64 for v in machine.variants):
        fault = "it has no kernel variant of 1 to 64 warps that computes"
    elif not all(map(math.isfinite, _rates(machine))):
        fault = "its rates must be numbers"
    if fault:
        raise PlanError(f"{subject} is damaged: {fault}")
    return machine


def _unknown_capability(fields: Mapping[str, Any]) -> str:
    """An error text with the first unknown capability and the known ones; "" if all are known."""
    words = fields.get("capabilities")
    try:
        for word in words if isinstance(words, (list, tuple)) else ():
            Capability.named(word)
    except PlanError as error:
        return str(error)
    return ""


def _rates(machine: Machine) -> list[float]:
    """All floating-point numbers of a machine model. A plan file could contain NaN or infinity in
    their place, so they are checked.
    """
    costs = dataclasses.astuple(machine.costs)
    return [machine.bandwidth_gbps, machine.tflops, *(v for v in costs if isinstance(v, float))]


def _unknown(value: Any, given: Any) -> str | None:
    """The name of the first field in `given` that the dataclass `value` does not have; None if it
    has all of them. The check is needed because conversion ignores unknown fields.
    """
    if isinstance(value, tuple):
        pairs = zip(value, given, strict=True)
        return next((name for v, g in pairs if (name := _unknown(v, g))), None)
    if not dataclasses.is_dataclass(value) or not isinstance(given, Mapping):
        return None
    names = [f.name for f in dataclasses.fields(value)]
    extra = [str(name) for name in given if name not in names]
    deeper = (_unknown(getattr(value, name), given[name]) for name in names if name in given)
    return extra[0] if extra else next((name for name in deeper if name), None)
