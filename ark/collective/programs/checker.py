"""Checks whether a program computes its collective. The check does not rely on how the program was
made.

`check` runs the program symbolically. Instead of data, every slot (memory of one chunk) holds the
set of ranks' contributions that were summed into it or, for reductions that depend on the order,
the tree of the summation. It raises PlanError for a program with an index out of range, a deadlock,
two conflicting accesses that no dependency orders, a read of an empty slot, a contribution that is
reduced twice, or a wrong result. Called by tests of programs, by the executor's users, by the
command line on files, and by the planner before it lowers a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ark.collective.programs.order import describe, in_order
from ark.collective.programs.reductions import REDUCTIONS
from ark.collective.programs.structure import check_structure, refusal
from ark.collective.programs.types import (
    Collective,
    CollectiveProgram,
    Kind,
    Operation,
    OpRef,
    Span,
    exchanged,
)
from ark.errors import PlanError

# The inputs that a value combines. An int is a set of ranks, one bit for each. If the order of the
# reduction matters, the expression is (op, left, right).
Expr: TypeAlias = "int | tuple[str, Expr, Expr]"
Place = tuple[int, str, int]


class Value(NamedTuple):
    """The content of a slot: the number of the chunk, and the contributions that were reduced into
    it. divide: the number by which the result was divided.
    """

    chunk: int
    expr: Expr
    divide: int = 1


class Dots(NamedTuple):
    """The content of a slot in a `dots` buffer: the dot products of two expressions, summed over
    the chunks whose bits are set in `chunks`.
    """

    a: Expr
    b: Expr
    chunks: int


@dataclass(frozen=True)
class Report:
    """The counts that `check` returns for a correct program. operations: all operations; puts and
    reduces are among them. steps: the largest number of puts on one chain of dependencies.
    """

    operations: int
    puts: int
    reduces: int
    steps: int


def check(program: CollectiveProgram) -> Report:
    """Returns a report if the program is correct. Otherwise raises PlanError with the first
    fault.
    """
    check_structure(program)
    order = in_order(program)
    _check_races(program, order)
    _Machine(program).run(order)
    step: dict[OpRef, int] = {}
    for ref in order:
        op = program.op(ref)
        step[ref] = max((step[d] for d in op.deps), default=0) + (op.kind is Kind.PUT)
    kinds = [program.op(ref).kind for ref in order]
    return Report(
        operations=len(kinds),
        puts=kinds.count(Kind.PUT),
        reduces=kinds.count(Kind.REDUCE) + kinds.count(Kind.BLEND),
        steps=max(step.values(), default=0),
    )


def _check_races(program: CollectiveProgram, order: list[OpRef]) -> None:
    """Raises PlanError unless dependencies order any two accesses to the same slot, if at least one
    of them is a write.
    """
    when = {ref: i for i, ref in enumerate(order)}
    writer: dict[Place, OpRef] = {}
    readers: dict[Place, list[OpRef]] = {}

    def ordered(first: OpRef, then: OpRef) -> bool:
        floor, stack, seen = when[first], [then], {then}
        while stack:
            for dep in program.op(stack.pop()).deps:
                if dep == first:
                    return True
                if dep not in seen and when[dep] > floor:
                    seen.add(dep)
                    stack.append(dep)
        return False

    def demand(first: OpRef | None, then: OpRef, place: Place) -> None:
        if first is not None and first != then and not ordered(first, then):
            raise refusal(
                program,
                f"{describe(program, then)} and {describe(program, first)} both touch "
                f"{place[1]}[{place[2]}] on rank {place[0]}, one of them writes, and no chain of "
                "dependencies orders them.",
            )

    for ref in order:
        op = program.op(ref)
        for span in op.srcs:
            for slot in span.slots():
                place = (ref.rank, span.buffer, slot)
                demand(writer.get(place), ref, place)
                readers.setdefault(place, []).append(ref)
        for slot in op.dst.slots():
            place = (op.writes_on(ref.rank), op.dst.buffer, slot)
            demand(writer.get(place), ref, place)
            for reader in readers.pop(place, ()):
                demand(reader, ref, place)
            writer[place] = ref


class _Machine:
    """The state of the symbolic execution of a program: the contents of all slots of all ranks."""

    def __init__(self, program: CollectiveProgram) -> None:
        self.p = program
        self.memory: dict[Place, Value | Dots] = {}
        for rank in range(program.ranks):
            if program.collective is Collective.BROADCAST and rank != program.root:
                continue
            shift = rank * program.shard if program.collective is Collective.ALL_GATHER else 0
            slots = program.buffer_by_name["in"].slots
            if program.counts is not None:
                slots = sum(program.counts[rank])
            for slot in range(slots):
                self.memory[rank, "in", slot] = Value(slot + shift, 1 << rank)

    def run(self, order: list[OpRef]) -> None:
        for ref in order:
            op = self.p.op(ref)
            columns = [self.read(ref, span) for span in op.srcs]
            if op.kind is Kind.DOT:
                result: list[Value | Dots] = [self.dot(ref, columns)]
            elif op.kind is Kind.BLEND:
                result = self.blend(ref, op, columns)
            elif op.kind is Kind.REDUCE:
                result = self.reduce(ref, op, columns)
            else:
                result = columns[0]
            owner = op.writes_on(ref.rank)
            for slot, value in zip(op.dst.slots(), result, strict=True):
                self.memory[owner, op.dst.buffer, slot] = value
        for rank in range(self.p.ranks):
            self.check_end(rank)

    def fault(self, ref: OpRef, text: str) -> PlanError:
        return refusal(self.p, f"{describe(self.p, ref)} {text}")

    def read(self, ref: OpRef, span: Span) -> list[Value | Dots]:
        column = [self.memory.get((ref.rank, span.buffer, slot)) for slot in span.slots()]
        if None in column:
            slot = span.start + column.index(None)
            raise self.fault(ref, f"reads {span.buffer}[{slot}], where nothing has arrived.")
        return [value for value in column if value is not None]

    def data(self, ref: OpRef, column: list[Value | Dots]) -> list[Value]:
        values = [value for value in column if isinstance(value, Value)]
        if any(value.divide != 1 for value in values):
            raise self.fault(ref, "combines a value that was already divided for the mean.")
        return values

    def reduce(self, ref: OpRef, op: Operation, columns: list[Any]) -> list[Value | Dots]:
        total: list[Any] = columns[0]
        if isinstance(total[0], Value) and op.reduce != self.reduction():
            raise self.fault(ref, f"does not compute {self.p.reduction}.")
        for column in columns[1:]:
            if isinstance(total[0], Dots):
                total = [self.add_dots(ref, a, b) for a, b in zip(total, column, strict=True)]
            else:
                self.data(ref, [*total, *column])
                if not REDUCTIONS[op.reduce or "sum"].elementwise:
                    self.demand_whole(ref, total)
                total = [self.merge(ref, op, a, b) for a, b in zip(total, column, strict=True)]
        if op.divide != 1:
            total = [value._replace(divide=op.divide) for value in total]
        return total

    def reduction(self) -> str | None:
        return "sum" if self.p.reduction == "mean" else self.p.reduction

    def merge(self, ref: OpRef, op: Operation, a: Value, b: Value) -> Value:
        if a.chunk != b.chunk:
            raise self.fault(ref, f"combines chunk {a.chunk} with chunk {b.chunk}.")
        if twice := ranks_in(a.expr) & ranks_in(b.expr):
            rank = (twice & -twice).bit_length() - 1
            raise self.fault(ref, f"reduces rank {rank}'s part of chunk {a.chunk} twice.")
        if REDUCTIONS[op.reduce or "sum"].elementwise:
            return Value(a.chunk, ranks_in(a.expr) | ranks_in(b.expr))
        return Value(a.chunk, (op.reduce or "", a.expr, b.expr))

    def demand_whole(self, ref: OpRef, column: list[Value]) -> None:
        chunks = [value.chunk for value in column]
        if chunks != list(range(self.p.chunks)) or len({value.expr for value in column}) != 1:
            raise self.fault(ref, "must combine all chunks of one partial result.")

    def dot(self, ref: OpRef, columns: list[Any]) -> Dots:
        a, b = (self.data(ref, column) for column in columns)
        chunks = 0
        for x, y in zip(a, b, strict=True):
            if x.chunk != y.chunk or (chunks >> x.chunk) & 1:
                raise self.fault(ref, "multiplies different chunks, or a chunk twice.")
            chunks |= 1 << x.chunk
        if len({x.expr for x in a}) != 1 or len({y.expr for y in b}) != 1:
            raise self.fault(ref, "multiplies chunks at different stages of the reduction.")
        return Dots(a[0].expr, b[0].expr, chunks)

    def add_dots(self, ref: OpRef, a: Dots, b: Dots) -> Dots:
        if (a.a, a.b) != (b.a, b.b) or a.chunks & b.chunks:
            raise self.fault(ref, "adds dot products of different vectors, or of a chunk twice.")
        return a._replace(chunks=a.chunks | b.chunks)

    def blend(self, ref: OpRef, op: Operation, columns: list[Any]) -> list[Value | Dots]:
        a, b, (dots,) = columns
        self.data(ref, [*a, *b])
        if op.reduce != self.reduction() or op.reduce not in ("adasum", "combiner"):
            raise self.fault(ref, f"does not compute {self.p.reduction}.")
        if dots.chunks != (1 << self.p.chunks) - 1:
            raise self.fault(ref, "uses dot products that do not cover the whole tensor.")
        if any((x.expr, y.expr) != (dots.a, dots.b) for x, y in zip(a, b, strict=True)):
            raise self.fault(ref, "uses dot products of other vectors than its sources.")
        return [self.merge(ref, op, x, y) for x, y in zip(a, b, strict=True)]

    def check_end(self, rank: int) -> None:
        p = self.p
        if p.collective is Collective.REDUCE and rank != p.root:
            return
        if p.counts is not None:
            ends = _unequal_ends(p, rank)
        else:
            slots = range(p.buffer_by_name["out"].slots)
            ends = [demanded(p, rank, slot) for slot in slots]
        for slot, wanted in enumerate(ends):
            got = self.memory.get((rank, "out", slot))
            if got != wanted:
                raise refusal(
                    p,
                    f"at the end rank {rank} must hold {_words(wanted)} in out[{slot}], "
                    f"but holds {_words(got)}.",
                )


def _unequal_ends(p: CollectiveProgram, rank: int) -> list[Value]:
    """The values that an all-to-all with unequal parts requires in the first slots of `out` on
    `rank`.
    """
    ends = []
    for source in range(p.ranks):
        here, _ = exchanged(p.ranks, p.chunks, p.counts, source, rank)
        ends += [Value(slot, 1 << source) for slot in here.slots()]
    return ends


def ranks_in(expr: Expr) -> int:
    """The set of ranks whose contributions an expression contains, as bits."""
    return expr if isinstance(expr, int) else ranks_in(expr[1]) | ranks_in(expr[2])


def demanded(p: CollectiveProgram, rank: int, slot: int) -> Value:
    """The value that the collective requires in out[slot] on `rank`."""
    if p.collective is Collective.ALL_GATHER:
        return Value(slot, 1 << (slot // p.shard))
    if p.collective is Collective.BROADCAST:
        return Value(slot, 1 << (p.root or 0))
    if p.collective is Collective.ALL_TO_ALL:
        return Value(rank * p.shard + slot % p.shard, 1 << (slot // p.shard))
    chunk = slot + (rank * p.shard if p.collective is Collective.REDUCE_SCATTER else 0)
    return Value(chunk, complete(p), p.ranks if p.reduction == "mean" else 1)


def complete(p: CollectiveProgram) -> Expr:
    """The expression of a value to which all ranks have contributed."""
    if p.reduction not in ("adasum", "combiner"):
        return (1 << p.ranks) - 1
    leaves: list[Expr] = [1 << rank for rank in range(p.ranks)]
    if p.reduction == "adasum":
        while len(leaves) > 1:
            leaves = [("adasum", a, b) for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
        return leaves[0]
    if p.reduction == "combiner":
        total = leaves[0]
        for leaf in leaves[1:]:
            total = ("combiner", total, leaf)
        return total
    return (1 << p.ranks) - 1


def _words(value: Value | Dots | None) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Dots):
        return "dot products"
    mask = ranks_in(value.expr)
    ranks = [r for r in range(mask.bit_length()) if mask >> r & 1]
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    over = "" if value.divide == 1 else f", divided by {value.divide}"
    return f"chunk {value.chunk} of rank{'s' if len(ranks) > 1 else ''} {names}{over}"
