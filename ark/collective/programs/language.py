"""`ark.comm.program`: a small language in which users write collective programs as moves of chunks.

    @ark.comm.program("all_gather", ranks=4)
    def ring(p):
        for rank in p.ranks:
            p.input(rank).to(p.output(rank, rank))
        for hop in range(len(p.ranks) - 1):
            for rank in p.ranks:
                shard = (rank - hop) % 4
                p.output(rank, shard).to(p.output((rank + 1) % 4, shard))

The function states moves and reductions in an order that would be correct if they ran one by one.
The dependencies between them are derived from this order (ark.collective.programs.builder). The
result is a checked CollectiveProgram, which every collective of ark accepts as its `algorithm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ark.collective.programs.builder import IN, OUT, ProgramBuilder
from ark.collective.programs.checker import check
from ark.collective.programs.types import Collective, CollectiveProgram, Span
from ark.errors import InvalidUsageError
from ark.ir.values import whole


@dataclass(frozen=True)
class Chunk:
    """Consecutive slots of a rank's buffer."""

    rank: int
    span: Span
    program: Program = field(repr=False, compare=False)

    def to(self, place: Chunk) -> Chunk:
        """Copies the chunk to a place with the same number of slots, on the same or another rank.
        Returns the place.
        """
        self.program.moved(self, place)
        return place

    def __iter__(self) -> Iterator[Chunk]:
        """Yields the slots one by one."""
        for slot in self.span.slots():
            yield Chunk(self.rank, Span(self.span.buffer, slot), self.program)


class Program:
    """The argument of a function that describes a program. Its methods return chunks of the ranks'
    buffers. ranks: all rank numbers.
    """

    def __init__(self, builder: ProgramBuilder, scratch: int) -> None:
        self._builder = builder
        self._scratch = builder.scratch(scratch) if scratch else ""
        self.ranks = range(builder.ranks)
        self.root = builder.root
        self.chunks = builder.chunks

    def input(self, rank: int, slot: int = 0, count: int = 1) -> Chunk:
        """Slots of a rank's input buffer. For a reduction or an all-to-all the buffer holds all
        chunks, for an all-gather only the rank's own chunks.
        """
        return self._place(rank, IN, slot, count)

    def output(self, rank: int, slot: int = 0, count: int = 1) -> Chunk:
        """Slots of a rank's output buffer, which holds the rank's result at the end."""
        return self._place(rank, OUT, slot, count)

    def scratch(self, rank: int, slot: int = 0, count: int = 1) -> Chunk:
        """Slots for intermediate results. Raises InvalidUsageError if the program has no scratch
        memory.
        """
        if not self._scratch:
            raise InvalidUsageError(
                "the program has no scratch memory; request it by ark.comm.program(..., scratch=N)"
            )
        return self._place(rank, self._scratch, slot, count)

    def reduce(self, *parts: Chunk, into: Chunk) -> Chunk:
        """Reduces chunks of one rank, from left to right, into another chunk of the rank. Returns
        that chunk.

        A result that is stored in the output buffer is final; for a mean, it is then divided by the
        number of ranks.
        """
        self._check_own(*parts, into)
        if {p.rank for p in parts} != {into.rank} or not parts:
            raise InvalidUsageError(
                f"reduce into rank {into.rank} was given chunks of the ranks "
                f"{[p.rank for p in parts]}; expected one or more of rank {into.rank}: move the "
                "others there first"
            )
        self._check_sizes(*parts, into)
        spans = [p.span for p in parts]
        self._builder.reduce(into.rank, spans, into.span, final=into.span.buffer == OUT)
        return into

    def moved(self, chunk: Chunk, place: Chunk) -> None:
        """Adds the operation for Chunk.to: a put if the ranks differ, otherwise a copy."""
        self._check_own(chunk, place)
        self._check_sizes(chunk, place)
        if chunk.rank == place.rank:
            self._builder.copy(chunk.rank, chunk.span, place.span)
        else:
            self._builder.put(chunk.rank, place.rank, chunk.span, place.span)

    def _place(self, rank: int, buffer: str, slot: int, count: int) -> Chunk:
        rank, slot, count = (whole("a place of a program", n) for n in (rank, slot, count))
        if rank not in self.ranks:
            raise InvalidUsageError(
                f"rank {rank} is out of range; the program has {len(self.ranks)} ranks, "
                "numbered from 0"
            )
        slots = self._builder.slots(buffer)
        if count < 1 or not 0 <= slot <= slots - count:
            raise InvalidUsageError(
                f"{count} slots of {buffer!r} from slot {slot} on are out of range; it has "
                f"{slots} slots, numbered from 0"
            )
        return Chunk(rank, Span(buffer, slot, count), self)

    def _check_own(self, *chunks: object) -> None:
        for chunk in chunks:
            if not isinstance(chunk, Chunk):
                raise InvalidUsageError(
                    f"expected a chunk, got {chunk!r:.60}; use the program's input, output and "
                    "scratch"
                )
            if chunk.program is not self:
                raise InvalidUsageError(
                    f"{chunk.span} of rank {chunk.rank} belongs to another program; use chunks "
                    "of this one"
                )

    @staticmethod
    def _check_sizes(*chunks: Chunk) -> None:
        if len({c.span.count for c in chunks}) > 1:
            raise InvalidUsageError(
                f"chunks of {[c.span.count for c in chunks]} slots cannot be combined; they "
                "must have equal sizes"
            )


def program(
    collective: Collective | str,
    ranks: int,
    chunks: int | None = None,
    *,
    scratch: int = 0,
    reduction: str | None = None,
    root: int | None = None,
    pieces: int = 1,
    name: str = "",
) -> Callable[[Callable[[Program], object]], CollectiveProgram]:
    """A decorator that turns a function into a checked program.

    chunks: the number of chunks of the data, by default one per rank. scratch: the number of
    scratch slots per rank (a slot holds one chunk). root: the root of a broadcast or reduce.
    pieces: every chunk is cut into this many pieces, and the program runs once for each piece,
    independently, so that long paths are pipelined. name: the program's name, by default the
    function's. Raises PlanError with the first fault of the program.

    Examples:
        >>> @ark.comm.program("broadcast", ranks=2, chunks=1, root=0)
        ... def star(p):
        ...     for rank in p.ranks:
        ...         p.input(0, 0).to(p.output(rank, 0))
        >>> star.name, star.ranks
        ('star', 2)
    """

    def decorate(function: Callable[[Program], object]) -> CollectiveProgram:
        label = name or str(getattr(function, "__name__", "program"))
        count = ranks if chunks is None else chunks
        slots = whole("the slots of scratch memory", scratch)
        if slots < 0:
            raise InvalidUsageError(f"scratch={slots} must be at least 0")
        builder = ProgramBuilder(label, collective, ranks, count, reduction, root, pieces)
        function(Program(builder, slots))
        built = builder.build()
        check(built)
        return built

    return decorate
