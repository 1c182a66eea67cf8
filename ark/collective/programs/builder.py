"""Builds collective programs. An algorithm adds the operations of all ranks to the builder, in an
order that would be correct if they ran one by one. From this order the builder derives the
dependencies between the operations (read after write, write after read, write after write, on any
rank). So the code of an algorithm is a plain loop over puts (one-sided writes) and reduces. Used by
the classics, ForestColl, TACCL, and reductions other than sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ark.collective.programs.structure import MOST_SLOTS
from ark.collective.programs.types import (
    Buffer,
    Collective,
    CollectiveProgram,
    Counts,
    Kind,
    Operation,
    OpRef,
    Role,
    Span,
    exchanged,
    io_slots,
)
from ark.errors import InvalidUsageError, UnsupportedError
from ark.ir.values import whole

IN = "in"
OUT = "out"


class ProgramBuilder:
    """Collects the operations of one program; `build()` freezes them.

    The buffers `in` and `out` exist from the start; `scratch()` and `dots()` add more. If
    `most_operations` is given, more operations raise UnsupportedError.
    """

    def __init__(
        self,
        name: str,
        collective: Collective | str,
        ranks: int,
        chunks: int,
        reduction: str | None = None,
        root: int | None = None,
        pieces: int = 1,
        most_operations: int | None = None,
        counts: Counts | None = None,
    ) -> None:
        if not (isinstance(name, str) and isinstance(reduction, str | None)):
            raise InvalidUsageError(
                f"A program's name and reduction must be strings, got {name!r:.60} and "
                f"{reduction!r:.60}."
            )
        self.name = name
        self.collective = Collective(collective)
        ranks, chunks = whole("A collective's ranks", ranks), whole("Its chunks", chunks)
        pieces, root = (
            whole("Its pieces", pieces),
            None if root is None else whole("Its root", root),
        )
        if ranks < 1 or chunks < 1 or pieces < 1:
            raise InvalidUsageError(
                "A collective needs at least one rank, one chunk and one piece, but got "
                f"{ranks} ranks, {chunks} chunks and {pieces} pieces."
            )
        if self.collective.rooted != (root is not None) or not 0 <= (root or 0) < ranks:
            raise InvalidUsageError(
                f"{self.collective.value} over {ranks} ranks was given root {root}; broadcast and "
                f"reduce need a root in 0..{ranks - 1}, and the others take none."
            )
        self.ranks = ranks
        self.chunks = chunks
        self.counts = counts
        self.root = root
        self.pieces = pieces
        self.reduction = (reduction or "sum") if self.collective.reduces else None
        in_slots, out_slots = io_slots(self.collective, ranks, chunks, counts)
        self._check_slots(in_slots + out_slots)
        self._buffers = [Buffer(IN, Role.IN, in_slots), Buffer(OUT, Role.OUT, out_slots)]
        self._operations: list[list[Operation]] = [[] for _ in range(ranks)]
        self._most, self._count = most_operations, 0
        self._writer: dict[tuple[int, str, int], OpRef] = {}
        self._readers: dict[tuple[int, str, int], list[OpRef]] = {}

    def slots(self, buffer: str) -> int:
        """The number of slots of the buffer on every rank."""
        return next(b.slots for b in self._buffers if b.name == buffer)

    def scratch(self, slots: int, name: str = "scratch") -> str:
        """Adds a scratch buffer of `slots` chunks and returns its name."""
        self._check_slots(slots)
        self._buffers.append(Buffer(name, Role.SCRATCH, slots))
        return name

    def dots(self, slots: int, name: str = "dots") -> str:
        """Adds a buffer of `slots` triples of dot products and returns its name."""
        self._buffers.append(Buffer(name, Role.DOTS, slots))
        return name

    def exchanged(self, src: int, dst: int) -> tuple[Span, Span]:
        """The slots of the part that an all-to-all sends from `src` to `dst`: in `in` on `src`, and
        in `out` on `dst`.
        """
        return exchanged(self.ranks, self.chunks, self.counts, src, dst)

    def put(
        self,
        rank: int,
        peer: int,
        src: Span,
        dst: Span,
        route: Sequence[str] = (),
        after: Iterable[OpRef] = (),
    ) -> OpRef:
        """Adds an operation: `rank` puts its slots `src` into the slots `dst` of `peer`. after:
        further operations that it depends on.
        """
        return self._add(rank, Kind.PUT, dst, (src,), peer=peer, route=tuple(route), after=after)

    def copy(self, rank: int, src: Span, dst: Span) -> OpRef:
        """Adds an operation: `rank` copies `src` to `dst`."""
        return self._add(rank, Kind.COPY, dst, (src,))

    def reduce(self, rank: int, srcs: Sequence[Span], dst: Span, final: bool = False) -> OpRef:
        """Adds an operation: `rank` reduces `srcs`, from left to right, into `dst` with the
        program's reduction.

        final: True if the result contains every rank's contribution. If the reduction is a mean,
        this operation then also divides by the number of ranks.
        """
        op = "sum" if self.reduction == "mean" else self.reduction
        divide = self.ranks if final and self.reduction == "mean" else 1
        return self._add(rank, Kind.REDUCE, dst, tuple(srcs), reduce=op, divide=divide)

    def reduce_dots(self, rank: int, srcs: Sequence[Span], dst: Span) -> OpRef:
        """Adds an operation: `rank` adds up triples of partial dot products."""
        return self._add(rank, Kind.REDUCE, dst, tuple(srcs), reduce="sum")

    def dot(self, rank: int, a: Span, b: Span, dst: Span) -> OpRef:
        """Adds an operation: `rank` writes [a.b, a.a, b.b] to the slot `dst` of a `dots` buffer."""
        return self._add(rank, Kind.DOT, dst, (a, b))

    def blend(self, rank: int, a: Span, b: Span, dots: Span, dst: Span) -> OpRef:
        """Adds an operation: `rank` combines `a` and `b` with coefficients from the triple `dots`,
        and writes the result to `dst`.
        """
        return self._add(rank, Kind.BLEND, dst, (a, b, dots), reduce=self.reduction)

    def build(self) -> CollectiveProgram:
        """Returns the frozen program."""
        return CollectiveProgram(
            name=self.name,
            collective=self.collective,
            ranks=self.ranks,
            chunks=self.chunks,
            buffers=tuple(self._buffers),
            operations=tuple(tuple(ops) for ops in self._operations),
            reduction=self.reduction,
            root=self.root,
            pieces=self.pieces,
            counts=self.counts,
        )

    def _add(
        self,
        rank: int,
        kind: Kind,
        dst: Span,
        srcs: tuple[Span, ...],
        peer: int | None = None,
        reduce: str | None = None,
        divide: int = 1,
        route: tuple[str, ...] = (),
        after: Iterable[OpRef] = (),
    ) -> OpRef:
        self._counted()
        ref = OpRef(rank, len(self._operations[rank]))
        deps = set(after)
        for span in srcs:
            for slot in span.slots():
                place = (rank, span.buffer, slot)
                if place in self._writer:
                    deps.add(self._writer[place])
                self._readers.setdefault(place, []).append(ref)
        owner = rank if peer is None else peer
        for slot in dst.slots():
            place = (owner, dst.buffer, slot)
            if place in self._writer:
                deps.add(self._writer[place])
            deps.update(self._readers.pop(place, ()))
            self._writer[place] = ref
        deps.discard(ref)
        self._operations[rank].append(
            Operation(kind, dst, srcs, peer, tuple(sorted(deps)), reduce, divide, route)
        )
        return ref

    def _check_slots(self, slots: int) -> None:
        """Raises UnsupportedError if there are more slots than the checker accepts, before memory
        is used for them.
        """
        if slots * self.ranks > MOST_SLOTS:
            raise InvalidUsageError(
                f"{self.ranks} ranks of {slots} slots exceed {MOST_SLOTS}, the most slots of "
                "all buffers of a program."
            )

    def _counted(self) -> None:
        self._count += 1
        if self._most is not None and self._count > self._most:
            raise UnsupportedError(
                f"{self.name} needs more operations for {self.collective.value} over {self.ranks} "
                f"ranks than the {self._most} allowed."
            )


class OperationCounter(ProgramBuilder):
    """Counts operations without storing them, so that a program that would be too large is refused
    before it is built.
    """

    def _add(self, rank: int, *_args: Any, **_more: Any) -> OpRef:
        self._counted()
        return OpRef(rank, 0)
