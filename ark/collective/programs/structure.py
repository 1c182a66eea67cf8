"""Checks that the description of a collective program is consistent: its names, ranges, peers and
lengths. For example, every slot that an operation names must exist.
`ark.collective.programs.checker` runs this check first, so that its symbolic execution accesses
only valid slots.
"""

from __future__ import annotations

from collections.abc import Callable

from ark.collective.programs.order import describe
from ark.collective.programs.reductions import REDUCTIONS
from ark.collective.programs.types import CollectiveProgram, Kind, Operation, OpRef, Role, io_slots
from ark.errors import InvalidUsageError, PlanError

MOST_SLOTS = 1 << 25  # limit for all ranks together, which bounds the checker's memory


def refusal(program: CollectiveProgram, text: str) -> PlanError:
    """Returns a PlanError for this program. text: the inconsistency, as a sentence after the
    program's name.
    """
    return PlanError(f"The program {program.name} is refused: {text}")


def check_structure(p: CollectiveProgram) -> None:
    """Raises PlanError with the first inconsistency."""
    if p.ranks < 1 or p.chunks < 1 or p.pieces < 1 or len(p.operations) != p.ranks:
        raise refusal(
            p,
            f"it names {p.ranks} ranks, {p.chunks} chunks and {p.pieces} pieces and has "
            f"{len(p.operations)} lists of operations; expected at least 1 of each, and one list "
            "per rank.",
        )
    try:
        in_slots, out_slots = io_slots(p.collective, p.ranks, p.chunks, p.counts)
    except InvalidUsageError as error:
        raise refusal(p, str(error)) from error
    if p.collective.rooted != (p.root is not None) or not 0 <= (p.root or 0) < p.ranks:
        raise refusal(p, f"{p.collective.value} cannot have the root {p.root}.")
    if p.collective.reduces and p.reduction not in REDUCTIONS:
        raise refusal(
            p, f"the reduction {p.reduction!r} does not exist; use one of {list(REDUCTIONS)}."
        )
    if p.reduction in REDUCTIONS and not REDUCTIONS[p.reduction].elementwise and p.pieces != 1:
        raise refusal(p, f"{p.reduction} needs whole tensors, which cannot be cut into pieces.")
    if p.reduction == "adasum" and p.ranks & (p.ranks - 1):
        raise refusal(p, f"Adasum needs a power of two of ranks, but there are {p.ranks}.")
    wanted = {"in": (Role.IN, in_slots), "out": (Role.OUT, out_slots)}
    if len(p.buffer_by_name) != len(p.buffers):
        raise refusal(p, "two of its buffers have the same name.")
    for buffer in p.buffers:
        io = buffer.role in (Role.IN, Role.OUT)
        if (io or buffer.name in wanted) and wanted.get(buffer.name) != (buffer.role, buffer.slots):
            raise refusal(
                p,
                f"the buffer {buffer.name} has the role {buffer.role.value} and {buffer.slots} "
                f"slots; {p.collective.value} needs a buffer `in` with {in_slots} slots and a "
                f"buffer `out` with {out_slots}.",
            )
    slots = p.ranks * sum(max(buffer.slots, 0) for buffer in p.buffers)
    if slots > MOST_SLOTS:
        raise refusal(
            p, f"its ranks have {slots} slots together; at most {MOST_SLOTS} are checked."
        )
    if missing := set(wanted) - set(p.buffer_by_name):
        raise refusal(p, f"it has no buffer {min(missing)}.")
    for ref in p.refs():
        _check_operation(p, ref, p.op(ref))


def _check_operation(p: CollectiveProgram, ref: OpRef, op: Operation) -> None:
    def fault(text: str) -> PlanError:
        return refusal(p, f"{describe(p, ref)} {text}")

    for span in (op.dst, *op.srcs):
        buffer = p.buffer_by_name.get(span.buffer)
        if buffer is None:
            raise fault(f"names the buffer {span.buffer}, which does not exist.")
        if span.count < 1 or span.start < 0 or span.start + span.count > buffer.slots:
            raise fault(f"exceeds the buffer {span.buffer}, which has {buffer.slots} slots.")
    for dep in op.deps:
        if not (0 <= dep.rank < p.ranks and 0 <= dep.position < len(p.operations[dep.rank])):
            raise fault(
                f"waits for rank {dep.rank} operation {dep.position}, which does not exist."
            )
    if (op.kind is Kind.PUT) != (op.peer is not None):
        raise fault("must have a peer if it is a put, and none otherwise.")
    if op.peer is not None and (not 0 <= op.peer < p.ranks or op.peer == ref.rank):
        raise fault(f"puts to rank {op.peer}; the peer must be another of {p.ranks} ranks.")
    if op.route and op.kind is not Kind.PUT:
        raise fault("has a route, but only puts have one.")
    if op.divide < 1 or (op.divide != 1 and op.kind is not Kind.REDUCE):
        raise fault(f"divides by {op.divide}; only a reduce divides, by at least 1.")
    _check_shape(p, op, fault)


def _check_shape(p: CollectiveProgram, op: Operation, fault: Callable[[str], PlanError]) -> None:
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
        raise fault("must have spans of the number, length and kind that this operation takes.")
