"""Plans of ranks that all do the same, with peers counted relative to each rank. One plan is stored
and each rank's plan is derived on demand. Created by ark.lower.ranks; the verifier checks one rank
and so proves all (ark.plan.verify.symmetry).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

from ark.plan import kind as kinds
from ark.plan.types import Plan, PlanTensor

Moved = Mapping[int, tuple[int, ...]]
"""By tensor, the number of elements per dimension by which its beginning moves from one rank to the
next. Such tensors are shards of a parameter that every rank stores completely.
"""


@dataclass(frozen=True)
class Rotated(Sequence[Plan]):
    """first: rank 0's plan. In rank r's plan, every rank number is increased by r (modulo the world
    size) and each tensor in `moved` begins r times its step later.
    """

    first: Plan
    moved: Moved = field(default_factory=dict)

    def everywhere(self, tensor: PlanTensor) -> list[PlanTensor]:
        """The tensor of rank 0's plan as each rank has it."""
        return [_moved(tensor, rank, self.moved) for rank in range(len(self))]

    def __len__(self) -> int:
        return self.first.world_size

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> list[Plan]: ...
    def __getitem__(self, index: int | slice) -> Plan | list[Plan]:
        ranks = range(len(self))[index]
        if isinstance(ranks, int):
            return on_rank(self.first, ranks, self.moved)
        return [self[r] for r in ranks]

    def __hash__(self) -> int:
        return id(self.first)


def on_rank(plan: Plan, rank: int, moved: Moved | None = None) -> Plan:
    """The plan of `rank`, if all ranks do the same as `plan` with ranks counted relative to their
    own.
    """
    by, world = rank - plan.rank, plan.world_size
    if not by:
        return plan
    rotated = replace(
        plan,
        rank=rank,
        tensors=tuple(_moved(t, by, moved) for t in plan.tensors) if moved else plan.tensors,
        buffers=tuple(replace(b, rank=(b.rank + by) % world) for b in plan.buffers),
        ops=tuple(replace(op, params=kinds.get(op.kind).on_rank(op.params, by)) for op in plan.ops),
        counters=tuple(replace(c, rank=(c.rank + by) % world) for c in plan.counters),
    )
    if plan.verified:
        rotated.mark_verified()
    return rotated


def mark_verified(plans: Sequence[Plan]) -> None:
    """Marks the plans of all ranks as verified."""
    for plan in [plans.first] if isinstance(plans, Rotated) else plans:
        plan.mark_verified()


def _moved(tensor: PlanTensor, by: int, moved: Moved) -> PlanTensor:
    steps = moved.get(tensor.id)
    if steps is None:
        return tensor
    offsets = tuple(o + by * s for o, s in zip(tensor.offsets, steps, strict=True))
    return replace(tensor, offsets=offsets)
