"""Part of the verifier: each op is valid for its task kind, and its tasks compute all of it exactly
once.

It checks that parameters, operands and coordinates fit the kind, that every tile is computed once,
that no task overwrites an operand that it still reads, and that operands which are read 16 bytes at
a time are aligned. The other parts of the verifier and the source writer rely on this.
"""

from __future__ import annotations

from collections import defaultdict

from ark.errors import PlanError
from ark.ir.values import row_major
from ark.plan import kind as kinds
from ark.plan.kind import Signature
from ark.plan.types import Plan, PlanTensor
from ark.plan.verify.rank_set import RankSet, refuse

Coords = tuple[tuple[int, ...], ...]
WIDEST_READ_BYTES = 16  # bytes of the widest read of a body


def check_work(rank_set: RankSet) -> None:
    """Raises PlanError for the first op that is not valid for its kind or is not computed
    completely.
    """
    done: set[tuple[object, Coords]] = set()  # equal ops have equal tiles
    for plan in rank_set.checked_plans:
        coords: dict[int, Coords] = defaultdict(tuple)
        for number in range(len(plan.phases)):
            listed = rank_set.listing(plan.rank, number).by_op
            coords.update({op: places for op, (_, places) in listed.items()})
        for op, sig in zip(plan.ops, rank_set.signatures(plan.rank), strict=True):
            kind = kinds.get(op.kind)
            try:
                if (sig.key, coords[op.id]) not in done:
                    kind.check(sig)
                    kind.places(sig).check(coords[op.id])
                    done.add((sig.key, coords[op.id]))
                _check_aliases(plan, op.operands, sig, coords[op.id])
                _check_alignment(plan, op.operands, sig)
            except PlanError as error:
                raise refuse(f"op {op.name!r} of kind {op.kind!r}: {error}") from error


def _check_aliases(plan: Plan, operands: tuple[int, ...], sig: Signature, coords: Coords) -> None:
    """Raises PlanError if a task writes an operand that shares memory with another operand, unless
    the task kind supports that (works in place).
    """
    tensors = [plan.tensors[t] for t in operands]
    pairs = [
        (i, j)
        for i, a in enumerate(tensors)
        for j, b in enumerate(tensors)
        if i != j and _share(a, b)
    ]
    if not pairs:
        return
    kind = kinds.get(sig.kind)
    able = kind.in_place(sig)
    written = {a.operand for c in coords for a in kind.accesses(sig, c) if a.write}
    for i, j in pairs:
        if i in written and not (
            j in able and j not in written and _same_layout(tensors[i], tensors[j])
        ):
            raise PlanError(
                f"tasks write operand {i}, which shares memory with operand {j}; kind "
                f"{sig.kind!r} works in place on the operands {sorted(able)} of equal layout only"
            )


def _same_layout(a: PlanTensor, b: PlanTensor) -> bool:
    return (a.dtype, a.shape, a.extents, a.offsets) == (b.dtype, b.shape, b.extents, b.offsets)


def _share(a: PlanTensor, b: PlanTensor) -> bool:
    """True where two tensors may share bytes."""
    if a.buffer != b.buffer:
        return False
    if a.extents == b.extents and a.dtype == b.dtype:
        return all(
            p < q + m and q < p + n
            for p, n, q, m in zip(a.offsets, a.shape, b.offsets, b.shape, strict=True)
        )
    (first, last), (begin, end) = _span(a), _span(b)
    return first < end and begin < last


def _span(tensor: PlanTensor) -> tuple[int, int]:
    """The first byte of a tensor in its buffer, and its last byte + 1."""
    items = tensor.items
    strides = row_major(items.extents)
    reach = sum((n - 1) * s for n, s in zip(items.shape, strides, strict=True))
    return tensor.first_byte, tensor.first_byte + (reach + 1) * tensor.itemsize


def _check_alignment(plan: Plan, operands: tuple[int, ...], sig: Signature) -> None:
    for index in sorted(kinds.get(sig.kind).wide(sig)):
        tensor = plan.tensors[operands[index]]
        at = max(plan.buffers[tensor.buffer].offset, 0) + tensor.first_byte
        if at % WIDEST_READ_BYTES:
            raise PlanError(
                f"operand {index} lies at byte {at}, expected a multiple of "
                f"{WIDEST_READ_BYTES}, the size of the widest read"
            )
