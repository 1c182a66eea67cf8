"""The types of a plan: a frozen, deterministic value that can be written as JSON and that holds
each processor's tasks.

A plan belongs to one rank. The planner makes it (ark.lower.pipeline), the verifier checks the plans
of all ranks together (ark.plan.verify), the writer emits source for it (ark.codegen.writer) and the
runtime loads it (ark.runtime.tables). Nothing here knows a device address.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ark.ir.dtype import by_name
from ark.ir.values import row_major
from ark.plan.signature import packet_bytes

# Where a buffer lives. `state` and `parameter` keep their contents between iterations and launches,
# `external` belongs to the caller, `symmetric` is visible to peers, `host` is mapped by the host,
# `packet` holds {value, epoch} pairs, `activation` is reused memory.
ARENAS = ("activation", "parameter", "state", "external", "symmetric", "host", "packet")

# Arenas whose buffers hold meaningful bytes before an iteration begins.
INITIAL = ("parameter", "state", "external", "host")

MAX_OPERANDS = 64  # of an op
MAX_PIECES = 32  # of a stage of the operand stream: parts of rows, copied side by side
MAX_PIECE_PITCH_BYTES = 1 << 28  # between pieces of one stage
BOX_ROW_BYTES = 128  # contiguous bytes of a row that a step of box copies loads
BOX_ALIGNMENT_BYTES = 16  # of the starts and strides of rows that box copies load

# The id of the iteration barrier's counter, which opens the next iteration. Its step says how many
# ranks begin it together: all, or the rank alone. In a plan of one rank it says how many tasks open
# it together.
ITERATION_BARRIER = 0


@dataclass(frozen=True)
class PlanBuffer:
    """Contiguous memory. rank: owner; a peer's buffer is found by its name when the plan is loaded.

    offset: bytes from the arena's start (-1 for a peer's, 0 for external buffers). initial: it
    holds meaningful bytes before an iteration begins (weights, state, inputs).
    """

    id: int
    name: str
    arena: str
    nbytes: int
    offset: int = 0
    rank: int = 0
    initial: bool = False


@dataclass(frozen=True)
class Items:
    """A box in a row-major array, counted in whole bytes or more: what memory is made of."""

    shape: tuple[int, ...]
    extents: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def start(self) -> int:
        """Items from the array's start to the box's first."""
        return sum(o * s for o, s in zip(self.offsets, row_major(self.extents), strict=True))


@dataclass(frozen=True)
class PlanTensor:
    """A view of a buffer: element [i, ...] is at offsets + i in a row-major array of `extents`.

    packet: elements are 8-byte {32-bit word, epoch} pairs, 4-byte ones where the type has 16 bits,
    and loading one is waiting for it.
    """

    id: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    extents: tuple[int, ...]
    offsets: tuple[int, ...]
    buffer: int
    packet: bool = False

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an item: an element, or the byte that elements of 4 bits share."""
        return packet_bytes(self.dtype) if self.packet else by_name(self.dtype).itemsize

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.items.shape) * self.itemsize

    @cached_property
    def items(self) -> Items:
        """The tensor as a box of items."""
        each = 1 if self.packet else by_name(self.dtype).per_item
        if each == 1:
            return Items(self.shape, self.extents, self.offsets)
        return Items(
            (*self.shape[:-1], -(-self.shape[-1] // each)),
            (*self.extents[:-1], self.extents[-1] // each),
            (*self.offsets[:-1], self.offsets[-1] // each),
        )

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Element strides per dimension."""
        return row_major(self.extents)

    @cached_property
    def start(self) -> int:
        """Elements from the buffer's start to element [0, ...]."""
        return sum(o * s for o, s in zip(self.offsets, self.strides, strict=True))

    @cached_property
    def first_byte(self) -> int:
        """Bytes from the buffer's start to element [0, ...]."""
        return self.items.start * self.itemsize


@dataclass(frozen=True)
class PlanOp:
    """What a group of tasks computes: a task kind, its static parameters and its operands.

    Ops are numbered in program order; running them in that order on one processor defines what the
    plan means. after: tensors that must be complete although no byte of them is read. claims: the
    counter from which its tasks take the numbers of unclaimed tiles, where they do.
    """

    id: int
    name: str
    kind: str
    params: Mapping[str, Any]
    operands: tuple[int, ...]
    after: tuple[int, ...] = ()
    claims: int | None = None


@dataclass(frozen=True, slots=True)
class PlanCounter:
    """A counter that only grows, by `step` an iteration. A peer's counter is found by its name.

    In iteration i (from 0) a wait for n signals ends when the counter has reached step * i + n: so
    a wait for none of this iteration's is one for all of those before it.
    """

    id: int
    name: str
    step: int
    rank: int = 0
    system: bool = False


MAX_STAGE_PAGES = 32
"""Pages in which the rows of a stage may lie: a lane of the loader copies those of one."""


def pages_of_stage(step: int, rows: int) -> int:
    """The most pages, of `rows` each, in which `step` consecutive rows lie."""
    return (step + rows - 2) // rows + 1


@dataclass(frozen=True, slots=True)
class FetchPages:
    """Where the rows of a growing fetch lie if they do not follow each other: row r is row r % rows
    of the page whose number is element r // rows of the operand `table` (int32). Pages are `pitch`
    bytes apart, in both operands; there are `count` of them, and a number of none of these is
    read as 0. The fetch's offset is inside of a page.
    """

    table: int
    rows: int
    pitch: int
    count: int


@dataclass(frozen=True, slots=True)
class Growth:
    """What makes a fetch one of rows that iterations append, as many as there are when it runs.

    length: operand, one int32: the rows that earlier iterations have appended; this iteration adds
    one. row: bytes of a row. part, parts: which share of all of them, this iteration's among them,
    is the task's. beside: an operand of the same layout, whose bytes follow in each stage. pages:
    where rows lie in pages.
    """

    length: int
    row: int
    part: int
    parts: int
    beside: int
    pages: FetchPages | None = None


@dataclass(frozen=True, slots=True)
class Fetch:
    """Consecutive bytes of an operand that the stream copies in stages of `stage` bytes.

    With `growth` they are the room for the operand's rows. Of n rows, at most as many as there is
    room for, the task takes those from n * part / parts to n * (part + 1) / parts, rounded down,
    in as many stages of whole rows as they fill; the newest is not copied, since this iteration
    makes it. Such a copy waits until the iteration may begin.

    With `parts` they are rows, of which `rows` at a time (the last time fewer) come in so many
    stages: each has one part of each of these rows, row after row.
    """

    operand: int
    offset: int
    nbytes: int
    stage: int
    growth: Growth | None = None
    rows: int = 1
    parts: int = 1

    @property
    def reach(self) -> int:
        """Bytes from `offset` to the end of what it may copy."""
        pages = self.growth.pages if self.growth is not None else None
        if self.growth is None or pages is None:
            return self.nbytes
        return (pages.count - 1) * pages.pitch + pages.rows * self.growth.row

    @property
    def piece(self) -> int:
        """Bytes of a row in each stage that has parts of rows."""
        return self.stage // self.rows


@dataclass(frozen=True, slots=True)
class Task:
    """One tile of an op on one processor."""

    op: int
    coord: tuple[int, ...]
    waits: tuple[tuple[int, int], ...] = ()
    signals: tuple[int, ...] = ()
    fetches: tuple[Fetch, ...] = ()

    @property
    def streamed(self) -> int:
        """Bytes that it takes from the operand stream in every iteration."""
        return sum(f.nbytes for f in self.fetches if f.growth is None)


@dataclass(frozen=True)
class Phase:
    """What one iteration does: an ordered task list per processor. variant: the place, in the
    machine's variants, of the one that its tasks run under.
    """

    name: str
    processors: tuple[tuple[Task, ...], ...]
    variant: int = 0


@dataclass(frozen=True)
class Plan:
    """Everything a loop kernel of one rank needs, but for addresses.

    verified: the verifier has accepted it together with the plans of all other ranks; a changed
    copy is not verified.
    """

    rank: int
    world_size: int
    machine: Mapping[str, Any]
    buffers: tuple[PlanBuffer, ...]
    tensors: tuple[PlanTensor, ...]
    ops: tuple[PlanOp, ...]
    counters: tuple[PlanCounter, ...]
    phases: tuple[Phase, ...]
    arenas: Mapping[str, int]
    meta: Mapping[str, Any] = field(default_factory=dict)
    verified: bool = field(default=False, init=False, compare=False, repr=False)

    def mark_verified(self) -> None:
        """Called by the verifier, and for plans read from ark's own signed cache."""
        object.__setattr__(self, "verified", True)

    @property
    def processors(self) -> int:
        return int(self.machine["processors"])

    @property
    def lists(self) -> int:
        """The most task lists that a phase has."""
        return max(len(phase.processors) for phase in self.phases)

    @property
    def variant(self) -> str:
        """The kernel variant of the last phase, by name."""
        return self.variant_of(len(self.phases) - 1)

    def variant_of(self, phase: int) -> str:
        """The kernel variant that a phase's tasks run under, by name."""
        place = self.phases[phase].variant if self.phases else 0
        return str(self.machine["variants"][place]["name"])

    @property
    def kernels(self) -> tuple[range, ...]:
        """The phases of each kernel: consecutive ones under one variant."""
        starts = [
            i
            for i, phase in enumerate(self.phases)
            if i == 0 or phase.variant != self.phases[i - 1].variant
        ]
        ends = [*starts[1:], len(self.phases)]
        return tuple(range(a, b) for a, b in zip(starts, ends, strict=True))
