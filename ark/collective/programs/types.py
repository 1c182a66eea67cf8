"""The frozen form of a collective: the operations of each rank on chunks, and their dependencies.

Every writer of collectives (the classics, ForestColl, TACCL) makes a `CollectiveProgram`; the
checker, the executor, the simulator and the planner read nothing else.

Data. The collective's data is cut into `chunks` equal chunks. Every rank has the same symmetric
buffers; a buffer is a row of slots, and a slot holds one chunk. A `Span` is `count` neighbouring
slots. Buffers have a role: `in` and `out` are the caller's, `scratch` is the program's own, and a
slot of `dots` holds three fp64 numbers instead of a chunk (see DOT). With R ranks and C chunks, and
K = C / R:

    collective      `in` on rank r                `out` on rank r, at the end
    all_gather      K slots: chunks rK..rK+K-1    C slots: every chunk
    reduce_scatter  C slots                       K slots: chunks rK..rK+K-1, reduced
    all_reduce      C slots                       C slots, reduced
    broadcast       C slots, read on root only    C slots: the root's
    reduce          C slots                       C slots, reduced, defined on root only
    all_to_all      C slots, slot sK+j for s      C slots, slot sK+j from s

An all-to-all may have parts of unequal length: `counts[r][s]` chunks go from rank r to rank s. C is
then the largest number of chunks that a rank sends. `in` holds the parts for rank 0, 1, ... one
after the other, `out` those from rank 0, 1, ... On every rank `in` has C slots, and `out` has the
largest number of chunks that a rank receives; slots behind a rank's own parts are not used.

Operations. Each rank has an ordered list. An operation waits for its dependencies, reads `srcs` on
its own rank, writes `dst`, and is then complete. In terms of put, signal and wait:

    PUT      `put` of srcs[0] into `dst` on rank `peer`, then `signal` the peer: complete once the
             data is visible there. `route` names the nodes that it passes, or is empty
    COPY     dst = srcs[0], on this rank
    REDUCE   dst = srcs[0] (op) srcs[1] (op) ..., from left to right, on this rank, then divided by
             `divide`; `dst` may be one of the sources. op is `reduce`
    DOT      dst (one `dots` slot) = [a.b, a.a, b.b] over the spans a = srcs[0], b = srcs[1], fp64
    BLEND    dst = ca * srcs[0] + cb * srcs[1], the coefficients from the `dots` slot srcs[2] by
             the rule of `reduce` ("adasum" or "combiner")

    A dependency on an operation of the same rank is local ordering. A dependency on an operation
    of another rank is a `wait` for a `signal` that the other rank sends when that operation is
    complete. For a PUT to this rank it is the put's own signal, which has no extra cost.

Only dependencies order operations. The list order is the order of issue: if every rank runs its
list strictly in order, there is no deadlock (the checker proves it). `out` on a rank is final when
the rank's own operations are complete and all puts to it have arrived; a consumer of one slot waits
only for its last writer (`ark.collective.programs.order.final_writers`). At the start all slots
but those of `in` may be written.

In lowering, an operation becomes a task, or one task per tile, because all but the whole-tensor
reductions are elementwise. A dependency becomes a counter on the consumer's rank, which the
producer's task signals and the consumer's task waits for.

Pieces. Chunks may be cut into `pieces` equal pieces. The program then stands for that many
independent copies of itself, copy i on piece i of every slot. This makes long paths a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ark.errors import InvalidUsageError


class Collective(str, Enum):
    """The kinds of collectives; see the table in the module's docstring.

    `Collective(name)` raises InvalidUsageError for unknown names.
    """

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_TO_ALL = "all_to_all"

    @classmethod
    def _missing_(cls, value: object) -> Collective:
        raise InvalidUsageError(
            f"the collective {value!r} does not exist; choose one of "
            f"{', '.join(each.value for each in cls)}."
        )

    @property
    def reduces(self) -> bool:
        """True if the contributions of several ranks are reduced."""
        return self in (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE, Collective.REDUCE)

    @property
    def rooted(self) -> bool:
        """True if one rank, the root, has a special role."""
        return self in (Collective.BROADCAST, Collective.REDUCE)

    @property
    def sharded(self) -> bool:
        """True if the chunks are divided among the ranks, so that their number must be a multiple
        of the ranks.
        """
        return self in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)


def no_algorithm(asked: object, known: Iterable[str], task: str = "") -> InvalidUsageError:
    """The error for an unknown algorithm name. task: what the algorithm was requested for."""
    wanted = f"{asked!r} for {task}" if task else repr(asked)
    return InvalidUsageError(f"{wanted} is not an algorithm; choose one of {', '.join(known)}.")


class Kind(str, Enum):
    """The kinds of operations; see the module's docstring."""

    PUT = "put"
    COPY = "copy"
    REDUCE = "reduce"
    DOT = "dot"
    BLEND = "blend"


class Role(str, Enum):
    """The uses of a buffer: the caller's input or output, scratch memory, or dot products."""

    IN = "in"
    OUT = "out"
    SCRATCH = "scratch"
    DOTS = "dots"


class OpRef(NamedTuple):
    """The position of an operation: `operations[rank][position]`."""

    rank: int
    position: int


@dataclass(frozen=True)
class Buffer:
    """A buffer of `slots` slots, which has the same size on every rank."""

    name: str
    role: Role
    slots: int


@dataclass(frozen=True)
class Span:
    """`count` neighbouring slots of a buffer, from slot `start` on."""

    buffer: str
    start: int
    count: int = 1

    def slots(self) -> range:
        """The slot numbers."""
        return range(self.start, self.start + self.count)

    def __str__(self) -> str:
        last = f":{self.start + self.count}" if self.count != 1 else ""
        return f"{self.buffer}[{self.start}{last}]"


@dataclass(frozen=True)
class Operation:
    """One operation of one rank; the module's docstring defines each kind.

    `peer` is the receiving rank of a PUT, and None for other kinds. `route` has the ids of the
    nodes that a PUT passes, from the sender to the receiver; it is empty if the network may choose
    the route.
    """

    kind: Kind
    dst: Span
    srcs: tuple[Span, ...]
    peer: int | None = None
    deps: tuple[OpRef, ...] = ()
    reduce: str | None = None
    divide: int = 1
    route: tuple[str, ...] = ()

    def writes_on(self, rank: int) -> int:
        """The rank whose memory the operation writes when `rank` runs it."""
        return rank if self.peer is None else self.peer


Counts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CollectiveProgram:
    """A whole collective; see the module's docstring. Equal programs are written as equal bytes.

    `reduction` names an entry of `ark.collective.programs.reductions.REDUCTIONS`, and is None for
    collectives that do not reduce. `root` is set for broadcast and reduce only. `counts` is set for
    an all-to-all with unequal parts only.
    """

    name: str
    collective: Collective
    ranks: int
    chunks: int
    buffers: tuple[Buffer, ...]
    operations: tuple[tuple[Operation, ...], ...]
    reduction: str | None = None
    root: int | None = None
    pieces: int = 1
    counts: Counts | None = None
    buffer_by_name: dict[str, Buffer] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffer_by_name", {b.name: b for b in self.buffers})

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.collective.value}, {self.ranks} ranks, {self.chunks} chunks, "
            f"{self.pieces} pieces"
        )

    @property
    def shard(self) -> int:
        """The number of chunks that one rank owns, if the collective divides chunks among ranks."""
        return self.chunks // self.ranks

    @property
    def permutes(self) -> bool:
        """True if `counts` states that every rank sends all of its chunks to one rank."""
        rows = self.counts or ()
        every = sorted([0] * (self.ranks - 1) + [self.chunks])
        lines = (*rows, *zip(*rows, strict=True))
        return bool(rows) and all(sorted(line) == every for line in lines)

    def op(self, ref: OpRef) -> Operation:
        """The operation at `ref`."""
        return self.operations[ref.rank][ref.position]

    def refs(self) -> list[OpRef]:
        """The positions of all operations, rank by rank."""
        return [OpRef(r, i) for r, ops in enumerate(self.operations) for i in range(len(ops))]

    def chunk_bytes(self, size_bytes: int) -> float:
        """The bytes of one chunk if the data (M in the papers) have `size_bytes` bytes."""
        return size_bytes / self.chunks


def exchanged(
    ranks: int, chunks: int, counts: Counts | None, src: int, dst: int
) -> tuple[Span, Span]:
    """Returns the slots of the part that an all-to-all sends from `src` to `dst`: in `in`, and in
    `out`.

    Both are empty if there is no such part.
    """
    if counts is None:
        part = chunks // ranks
        return Span("in", dst * part, part), Span("out", src * part, part)
    count = counts[src][dst]
    before = sum(row[dst] for row in counts[:src])
    return Span("in", sum(counts[src][:dst]), count), Span("out", before, count)


def check_counts(collective: Collective, ranks: int, counts: Counts) -> None:
    """Raises InvalidUsageError unless these are valid counts of an all-to-all over the ranks."""
    square = len(counts) == ranks and all(len(row) == ranks for row in counts)
    numbers = [number for row in counts for number in row]
    if (
        collective is not Collective.ALL_TO_ALL
        or not square
        or min(numbers) < 0
        or not any(numbers)
    ):
        raise InvalidUsageError(
            f"counts are for all_to_all, a row of {ranks} numbers for each of {ranks} ranks, 0 "
            f"or more and not all 0; {collective.value} got {str(counts)[:60]}."
        )


def io_slots(
    collective: Collective, ranks: int, chunks: int, counts: Counts | None = None
) -> tuple[int, int]:
    """Returns how many slots `in` and `out` have; see the table in the module's docstring."""
    if counts is not None:
        check_counts(collective, ranks, counts)
        most = max(map(sum, counts))
        if chunks != most:
            raise InvalidUsageError(
                f"chunks={chunks} does not match the counts: the busiest rank sends {most} chunks."
            )
        return most, max(map(sum, zip(*counts, strict=True)))
    if collective.sharded and chunks % ranks:
        raise InvalidUsageError(
            f"{collective.value}: chunks={chunks} is not divisible by {ranks} ranks; use a "
            f"multiple of {ranks}."
        )
    shard = chunks // ranks
    if collective is Collective.ALL_GATHER:
        return shard, chunks
    if collective is Collective.REDUCE_SCATTER:
        return chunks, shard
    return chunks, chunks
