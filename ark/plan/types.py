"""The types of a plan: a frozen, deterministic value that can be written as JSON and that contains
each processor's tasks.

A plan belongs to one rank. The planner creates the plan (ark.lower.pipeline), the verifier checks
it together with those of all other ranks (ark.plan.verify), code generation writes the source of
its kernel (ark.backend.codegen.writer), and the runtime loads it (ark.runtime.tables). A plan
contains no device addresses.
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

# The arenas of buffers. `state` and `parameter` keep their contents between iterations and
# launches, `external` belongs to the caller, `symmetric` is visible to peers, `host` is mapped by
# the host, `packet` holds {value, epoch} pairs, `activation` is reused memory.
ARENAS = ("activation", "parameter", "state", "external", "symmetric", "host", "packet")

# Arenas whose buffers have valid contents before an iteration begins, such as weights.
INITIAL = ("parameter", "state", "external", "host")

MAX_OPERANDS = 64  # per op
MAX_PIECES = 32  # per stage of the operand stream: parts of rows, copied side by side
MAX_PIECE_PITCH_BYTES = 1 << 28  # largest distance between pieces of a stage
BOX_ROW_BYTES = 128  # contiguous bytes of a row that a step of box copies loads
BOX_ALIGNMENT_BYTES = 16  # alignment of the starts and strides of rows that box copies load

# The number of the counter that opens the next iteration (the iteration barrier). The barrier's
# step is the number of signals that open an iteration. In a plan of several ranks it is the number
# of ranks if all ranks open an iteration at once, or 1 if each rank opens its own. In a plan of one
# rank it is the number of tasks that signal the barrier.
ITERATION_BARRIER = 0


@dataclass(frozen=True)
class PlanBuffer:
    """Contiguous memory. rank: the rank whose memory it is. A buffer of a peer is looked up by its
    name when the plan is loaded. offset: bytes from the arena's start (-1 for a peer's buffer, 0
    for external buffers). initial: True if it has valid contents before an iteration begins
    (weights, state, inputs).
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
    """A box in a row-major array, counted in items. An item is an element, or for types of less
    than 8 bits a byte with several elements.
    """

    shape: tuple[int, ...]
    extents: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def start(self) -> int:
        """The number of items from the start of the array to the first item of the box."""
        return sum(o * s for o, s in zip(self.offsets, row_major(self.extents), strict=True))


@dataclass(frozen=True)
class PlanTensor:
    """A view of a buffer. The buffer is a row-major array of shape `extents`, in which element
    [i, ...] of the tensor has the indices offsets + [i, ...].

    packet: True if elements are stored as packets, together with the number of the iteration (the
    epoch), in 8 bytes or, for 16-bit types, in 4 bytes. A reader polls until the epoch is right.
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
        """Bytes of an item. An item is an element, or the byte that several elements of less than 8
        bits share.
        """
        return packet_bytes(self.dtype) if self.packet else by_name(self.dtype).itemsize

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.items.shape) * self.itemsize

    @cached_property
    def items(self) -> Items:
        """The elements of the tensor as a box of items in its buffer (see Items)."""
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
    """The computation of a group of tasks: a task kind, its static parameters and its operands.

    Ops are numbered in program order. The plan's results are defined as those of running the ops in
    that order on one processor. after: tensors that must be complete before the op runs although it
    does not read them. claims: for an op whose tasks claim tiles, the counter from which a task
    takes the number of the next tile by an atomic add.
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
    """A counter that only grows. It grows by `step` in each iteration. A peer's counter is looked
    up by its name.

    In iteration i (from 0) a wait for n signals ends when the counter has reached step * i + n. So
    a wait with n = 0 waits for all signals of earlier iterations.
    """

    id: int
    name: str
    step: int
    rank: int = 0
    system: bool = False


MAX_STAGE_PAGES = 32
"""The largest number of pages (blocks of rows of a paged KV cache) from which the rows of one stage
of the ring may come. Each lane of the loading warp copies the rows of one page.
"""


def pages_of_stage(step: int, rows: int) -> int:
    """The largest number of pages that `step` consecutive rows may touch. rows: the number of rows
    of a page.
    """
    return (step + rows - 2) // rows + 1


@dataclass(frozen=True, slots=True)
class FetchPages:
    """Describes where a growing fetch (see Growth) finds its rows if the cache is stored in pages
    of `rows` rows. Row r of the cache is row r % rows of a page. The number of this page is element
    r // rows of the operand `table` (int32). There are `count` pages, whose starts are `pitch`
    bytes apart. A page number out of range is read as 0. The offset of the fetch is relative to the
    start of a page.
    """

    table: int
    rows: int
    pitch: int
    count: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Describes a growing fetch. A fetch copies bytes to shared memory ahead of a task. A growing
    fetch copies rows of a cache to which each iteration appends one row, so the number of rows is
    known only at run time.

    length: the operand (one int32) with the number of rows that earlier iterations appended. row:
    bytes of a row. part, parts: the rows, including this iteration's, are divided into `parts`
    equal ranges, and the task reads range number `part`. beside: a second operand of the same
    layout. For example, the fetch's operand has the keys of attention and `beside` the values. In
    each stage its rows follow the rows of the first operand. pages: set if the rows are stored in
    pages. window: if above 0, only that number of latest rows are divided and copied.
    """

    length: int
    row: int
    part: int
    parts: int
    beside: int
    pages: FetchPages | None = None
    window: int = 0


@dataclass(frozen=True, slots=True)
class Fetch:
    """Consecutive bytes of an operand that are copied to shared memory before a task needs them.
    They are copied in stages: `stage` bytes at a time go to one slot of the ring. All fetches of a
    processor are its operand stream.

    With `growth`, the bytes are the space for all rows of a cache. If it has n rows, the task takes
    rows n * part / parts to n * (part + 1) / parts, rounded down, in stages of whole rows. The
    newest row is not copied, since this iteration computes it. Such a copy waits until the
    iteration barrier opens the iteration; other copies may run ahead across iterations.

    With `parts`, the bytes are rows of a matrix. They are copied in groups of `rows` rows (the last
    group may have fewer), and each row is cut into `parts` equal parts. Stage i of a group contains
    part i of each of its rows. For example, with rows = 8 and parts = 2, the first stage has the
    first halves of 8 rows, the second stage their second halves.
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
        """The number of bytes from `offset` to the end of the last byte that may be copied."""
        pages = self.growth.pages if self.growth is not None else None
        if self.growth is None or pages is None:
            return self.nbytes
        return (pages.count - 1) * pages.pitch + pages.rows * self.growth.row

    @property
    def piece(self) -> int:
        """The bytes of each row that one stage contains, if a stage contains only a part of each
        row.
        """
        return self.stage // self.rows


@dataclass(frozen=True, slots=True)
class Task:
    """One tile of an op on one processor: the op, the tile's coordinates, and the waits, signals
    and fetches of the task.
    """

    op: int
    coord: tuple[int, ...]
    waits: tuple[tuple[int, int], ...] = ()
    signals: tuple[int, ...] = ()
    fetches: tuple[Fetch, ...] = ()

    @property
    def streamed(self) -> int:
        """Bytes that are copied ahead of time for this task in every iteration, without fetches
        that grow.
        """
        return sum(f.nbytes for f in self.fetches if f.growth is None)


@dataclass(frozen=True)
class Phase:
    """An entry point of a plan, such as `prompt` or `decode`: an ordered list of tasks for each
    processor, which one iteration runs. variant: the index, in the machine's list of kernel
    variants, of the variant under which the phase runs.
    """

    name: str
    processors: tuple[tuple[Task, ...], ...]
    variant: int = 0


@dataclass(frozen=True)
class Plan:
    """Everything that a loop kernel of one rank needs, except addresses.

    verified: True once the verifier has accepted it and the plans of all other ranks; a changed
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
        """Marks the plan as verified. Called by the verifier, and for plans read from ark's own
        signed cache.
        """
        object.__setattr__(self, "verified", True)

    @property
    def processors(self) -> int:
        return int(self.machine["processors"])

    @property
    def lists(self) -> int:
        """The number of task lists of a phase; of several phases, the largest number."""
        return max(len(phase.processors) for phase in self.phases)

    @property
    def variant(self) -> str:
        """The name of the kernel variant under which the last phase runs."""
        return self.variant_of(len(self.phases) - 1)

    def variant_of(self, phase: int) -> str:
        """The name of the kernel variant under which a phase's tasks run."""
        place = self.phases[phase].variant if self.phases else 0
        return str(self.machine["variants"][place]["name"])

    @property
    def kernels(self) -> tuple[range, ...]:
        """The phases of each kernel. Consecutive phases with the same variant share a kernel."""
        starts = [
            i
            for i, phase in enumerate(self.phases)
            if i == 0 or phase.variant != self.phases[i - 1].variant
        ]
        ends = [*starts[1:], len(self.phases)]
        return tuple(range(a, b) for a, b in zip(starts, ends, strict=True))
