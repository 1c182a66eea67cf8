"""Decides whether a program does what its collective demands, trusting nothing that wrote it.

`check` runs the program symbolically: every slot holds the set (or, for reductions whose order
matters, the tree) of contributions that it is made of. It refuses a program with an index out of
range, a deadlock, an access that no dependency orders, a read of nothing, a contribution reduced
twice, or a wrong end. Called by every test that makes a program, by the executor's users, by the
command line on files, and by the planner before it lowers a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ark.comm.program.order import describe, in_order
from ark.comm.program.reductions import REDUCTIONS
from ark.comm.program.types import (
    Collective,
    CollectiveProgram,
    Kind,
    Operation,
    OpRef,
    Role,
    Span,
    io_slots,
)
from ark.errors import InvalidUsageError, PlanError

MOST_SLOTS = 1 << 25  # on all ranks together: what a check may take in memory

# The contributions in a value: a bit set of ranks, or (op, left, right) where order matters.
Expr: TypeAlias = "int | tuple[str, Expr, Expr]"
Place = tuple[int, str, int]


class Value(NamedTuple):
    """What a slot holds: a chunk of the data, made of contributions, divided by `divide`."""

    chunk: int
    expr: Expr
    divide: int = 1


class Dots(NamedTuple):
    """What a `dots` slot holds: partial dot products of two expressions over a set of chunks."""

    a: Expr
    b: Expr
    chunks: int


@dataclass(frozen=True)
class Report:
    """What `check` saw: operations by kind, and the most puts on one chain of dependencies."""

    operations: int
    puts: int
    reduces: int
    steps: int


def check(program: CollectiveProgram) -> Report:
    """Returns a report if the program is right; raises PlanError with the first fault if not."""
    _check_structure(program)
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


def _fault(program: CollectiveProgram, text: str) -> PlanError:
    return PlanError(f"The program {program.name} is refused: {text}")


def _check_structure(program: CollectiveProgram) -> None:
    p = program
    if p.ranks < 1 or p.chunks < 1 or p.pieces < 1 or len(p.operations) != p.ranks:
        raise _fault(
            p,
            f"it names {p.ranks} ranks, {p.chunks} chunks and {p.pieces} pieces and lists "
            f"{len(p.operations)} ranks' operations; all must be at least 1 and the lists match.",
        )
    try:
        in_slots, out_slots = io_slots(p.collective, p.ranks, p.chunks)
    except InvalidUsageError as error:
        raise _fault(p, str(error)) from error
    if p.collective.rooted != (p.root is not None) or not 0 <= (p.root or 0) < p.ranks:
        raise _fault(p, f"{p.collective.value} cannot have the root {p.root}.")
    if p.collective.reduces and p.reduction not in REDUCTIONS:
        raise _fault(p, f"there is no reduction {p.reduction!r}; use one of {list(REDUCTIONS)}.")
    if p.reduction in REDUCTIONS and not REDUCTIONS[p.reduction].elementwise and p.pieces != 1:
        raise _fault(p, f"{p.reduction} looks at whole tensors, which cannot be cut in pieces.")
    if p.reduction == "adasum" and p.ranks & (p.ranks - 1):
        raise _fault(p, f"Adasum needs a power of two of ranks, but there are {p.ranks}.")
    wanted = {"in": (Role.IN, in_slots), "out": (Role.OUT, out_slots)}
    if len(p.buffer_by_name) != len(p.buffers):
        raise _fault(p, "two of its buffers have the same name.")
    for buffer in p.buffers:
        io = buffer.role in (Role.IN, Role.OUT)
        if (io or buffer.name in wanted) and wanted.get(buffer.name) != (buffer.role, buffer.slots):
            raise _fault(
                p,
                f"the buffer {buffer.name} ({buffer.role.value}, {buffer.slots} slots) does not "
                f"fit: {p.collective.value} has in with {in_slots} and out with {out_slots} slots.",
            )
    slots = p.ranks * sum(max(buffer.slots, 0) for buffer in p.buffers)
    if slots > MOST_SLOTS:
        raise _fault(p, f"its ranks have {slots} slots together; at most {MOST_SLOTS} are checked.")
    if missing := set(wanted) - set(p.buffer_by_name):
        raise _fault(p, f"it has no buffer {min(missing)}.")
    for ref in p.refs():
        _check_operation(p, ref, p.op(ref))


def _check_operation(p: CollectiveProgram, ref: OpRef, op: Operation) -> None:
    def fault(text: str) -> PlanError:
        return _fault(p, f"{describe(p, ref)} {text}")

    for span in (op.dst, *op.srcs):
        buffer = p.buffer_by_name.get(span.buffer)
        if buffer is None:
            raise fault(f"names the buffer {span.buffer}, which does not exist.")
        if span.count < 1 or span.start < 0 or span.start + span.count > buffer.slots:
            raise fault(f"leaves the buffer {span.buffer}, which has {buffer.slots} slots.")
    for dep in op.deps:
        if not (0 <= dep.rank < p.ranks and 0 <= dep.position < len(p.operations[dep.rank])):
            raise fault(
                f"waits for rank {dep.rank} operation {dep.position}, which does not exist."
            )
    if (op.kind is Kind.PUT) != (op.peer is not None):
        raise fault("must name a peer if and only if it is a put.")
    if op.peer is not None and (not 0 <= op.peer < p.ranks or op.peer == ref.rank):
        raise fault(f"puts to rank {op.peer}; the peer must be another of {p.ranks} ranks.")
    if op.route and op.kind is not Kind.PUT:
        raise fault("has a route, but only puts travel.")
    if op.divide < 1 or (op.divide != 1 and op.kind is not Kind.REDUCE):
        raise fault(f"divides by {op.divide}; only a reduce divides, by at least 1.")
    _check_shape(p, op, fault)


def _check_shape(p: CollectiveProgram, op: Operation, fault) -> None:
    dots = [p.buffer_by_name[s.buffer].role is Role.DOTS for s in (op.dst, *op.srcs)]
    counts = [s.count for s in op.srcs]
    combines = op.kind in (Kind.REDUCE, Kind.BLEND)
    if combines != (op.reduce is not None) or (op.reduce or "sum") not in REDUCTIONS:
        raise fault(f"has the reduction {op.reduce!r}, which does not fit its kind.")
    if op.kind is Kind.DOT:
        good = len(counts) == 2 and counts[0] == counts[1] and op.dst.count == 1
        good = good and dots == [True, False, False]
    elif op.kind is Kind.BLEND:
        good = len(counts) == 3 and counts == [op.dst.count, op.dst.count, 1]
        good = good and dots == [False, False, False, True]
    else:
        good = len(counts) >= 2 if op.kind is Kind.REDUCE else len(counts) == 1
        good = good and set(counts) == {op.dst.count} and len(set(dots)) == 1
        good = good and not (op.kind is Kind.REDUCE and dots[0] and op.reduce != "sum")
    if not good:
        raise fault("has spans whose number, length or kind does not fit.")


def _check_races(program: CollectiveProgram, order: list[OpRef]) -> None:
    """Every two accesses to one slot, one of them a write, must be ordered by dependencies."""
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
            raise _fault(
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
    """The symbolic memory of all ranks."""

    def __init__(self, program: CollectiveProgram) -> None:
        self.p = program
        self.memory: dict[Place, Value | Dots] = {}
        for rank in range(program.ranks):
            if program.collective is Collective.BROADCAST and rank != program.root:
                continue
            shift = rank * program.shard if program.collective is Collective.ALL_GATHER else 0
            for slot in range(program.buffer_by_name["in"].slots):
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
        return _fault(self.p, f"{describe(self.p, ref)} {text}")

    def read(self, ref: OpRef, span: Span) -> list[Value | Dots]:
        column = [self.memory.get((ref.rank, span.buffer, slot)) for slot in span.slots()]
        if None in column:
            slot = span.start + column.index(None)
            raise self.fault(ref, f"reads {span.buffer}[{slot}], where nothing has arrived.")
        return [value for value in column if value is not None]

    def data(self, ref: OpRef, column: list[Value | Dots]) -> list[Value]:
        values = [value for value in column if isinstance(value, Value)]
        if any(value.divide != 1 for value in values):
            raise self.fault(ref, "combines a value that is already divided.")
        return values

    def reduce(self, ref: OpRef, op: Operation, columns: list) -> list[Value | Dots]:
        total = columns[0]
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
            raise self.fault(ref, "needs the whole tensor of one and the same partial result.")

    def dot(self, ref: OpRef, columns: list) -> Dots:
        a, b = (self.data(ref, column) for column in columns)
        chunks = 0
        for x, y in zip(a, b, strict=True):
            if x.chunk != y.chunk or (chunks >> x.chunk) & 1:
                raise self.fault(ref, "multiplies chunks that do not belong together.")
            chunks |= 1 << x.chunk
        if len({x.expr for x in a}) != 1 or len({y.expr for y in b}) != 1:
            raise self.fault(ref, "multiplies chunks at different stages of the reduction.")
        return Dots(a[0].expr, b[0].expr, chunks)

    def add_dots(self, ref: OpRef, a: Dots, b: Dots) -> Dots:
        if (a.a, a.b) != (b.a, b.b) or a.chunks & b.chunks:
            raise self.fault(ref, "adds dot products of different vectors, or a part twice.")
        return a._replace(chunks=a.chunks | b.chunks)

    def blend(self, ref: OpRef, op: Operation, columns: list) -> list[Value | Dots]:
        a, b, (dots,) = columns
        self.data(ref, [*a, *b])
        if op.reduce != self.reduction() or op.reduce not in ("adasum", "combiner"):
            raise self.fault(ref, f"does not compute {self.p.reduction}.")
        if dots.chunks != (1 << self.p.chunks) - 1:
            raise self.fault(ref, "uses dot products that do not cover the whole tensor.")
        if any((x.expr, y.expr) != (dots.a, dots.b) for x, y in zip(a, b, strict=True)):
            raise self.fault(ref, "uses the dot products of other vectors than those it blends.")
        return [self.merge(ref, op, x, y) for x, y in zip(a, b, strict=True)]

    def check_end(self, rank: int) -> None:
        p = self.p
        if p.collective is Collective.REDUCE and rank != p.root:
            return
        for slot in range(p.buffer_by_name["out"].slots):
            wanted = demanded(p, rank, slot)
            got = self.memory.get((rank, "out", slot))
            if got != wanted:
                raise _fault(
                    p,
                    f"at the end rank {rank} must hold {_words(wanted)} in out[{slot}], "
                    f"but holds {_words(got)}.",
                )


def ranks_in(expr: Expr) -> int:
    """The bit set of ranks whose contributions an expression holds."""
    return expr if isinstance(expr, int) else ranks_in(expr[1]) | ranks_in(expr[2])


def demanded(p: CollectiveProgram, rank: int, slot: int) -> Value:
    """What the collective wants in out[slot] on `rank`."""
    if p.collective is Collective.ALL_GATHER:
        return Value(slot, 1 << (slot // p.shard))
    if p.collective is Collective.BROADCAST:
        return Value(slot, 1 << (p.root or 0))
    if p.collective is Collective.ALL_TO_ALL:
        return Value(rank * p.shard + slot % p.shard, 1 << (slot // p.shard))
    chunk = slot + (rank * p.shard if p.collective is Collective.REDUCE_SCATTER else 0)
    return Value(chunk, complete(p), p.ranks if p.reduction == "mean" else 1)


def complete(p: CollectiveProgram) -> Expr:
    """The expression of a finished reduction over all ranks."""
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
