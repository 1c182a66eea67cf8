"""The plans of ranks that all do the same work. Only rank 0's plan is stored. The plan of rank r is
derived from it on demand: r is added to every rank number in the plan (modulo the number of ranks).
Created by ark.lower.ranks. The verifier checks one of the plans, which proves all
(ark.plan.verify.symmetry).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

from ark.plan import kind as kinds
from ark.plan.types import Plan, PlanTensor

Moved = Mapping[int, tuple[int, ...]]
"""Describes tensors that begin at a different offset on each rank. Keys are tensor ids. A value is
the distance between the tensor's offsets on one rank and on the next rank, in elements for each
dimension. Such tensors are parts of a parameter that every rank stores completely.
"""


@dataclass(frozen=True)
class Rotated(Sequence[Plan]):
    """The plans of all ranks as a sequence. first: rank 0's plan. moved: the tensors whose offset
    differs between ranks, each with a step. In rank r's plan, every rank number is increased by r
    (modulo the number of ranks), and the offset of each tensor in `moved` is increased by r times
    its step.
    """

    first: Plan
    moved: Moved = field(default_factory=dict)

    def everywhere(self, tensor: PlanTensor) -> list[PlanTensor]:
        """For one tensor of rank 0's plan, the corresponding tensor in the plan of each rank."""
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
    """The plan of rank `rank`, derived from rank 0's plan. All ranks must do the same work. If rank
    0's task accesses memory of rank p, the same task of rank r accesses memory of rank p + r.
    moved: see Moved.
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
