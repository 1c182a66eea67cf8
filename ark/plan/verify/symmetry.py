"""Part of the verifier: finds ranks that do the same work, so that only one of them is checked.

A renaming gives each rank a new number. It is a symmetry if the plan of each rank, with its rank
numbers renamed, equals the plan of the rank with the new number. Then a property that is proved for
a rank also holds for the rank to which the renaming maps it. So one rank of each set of ranks that
symmetries map to each other is checked (ark.plan.verify.rank_set). The renaming is verified for
every buffer, counter and task; no statement of the planner is trusted. A rank without a symmetry is
checked itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ark.errors import PlanError
from ark.plan import kind as kinds
from ark.plan.params import read_params
from ark.plan.rotated import Rotated
from ark.plan.types import Plan, PlanOp

Renaming = tuple[int, ...]


@dataclass(frozen=True)
class Symmetry:
    """The symmetries of the plans of all ranks. twin: for each rank, the rank that is checked in
    its place because it does the same work. renaming[r]: the renaming of ranks that turns the plan
    of r's twin into the plan of r; its element q is the new number of rank q.
    """

    twin: tuple[int, ...]
    renaming: tuple[Renaming, ...]

    @property
    def checked(self) -> tuple[int, ...]:
        """The checked ranks, in rising order."""
        return tuple(sorted(set(self.twin)))


def alone(world: int) -> Symmetry:
    """The result if no symmetry was found: every rank is checked itself."""
    same = tuple(range(world))
    return Symmetry(same, (same,) * world)


def symmetry_of(plans: Sequence[Plan]) -> Symmetry:
    """The symmetries among three kinds of renamings: rotations of all ranks, rotations of blocks of
    neighbouring ranks, and rotations of the ranks within each block. For example, of 8 ranks in
    blocks of 4, the second kind maps rank 1 to rank 5, the third kind maps rank 3 to rank 0.
    """
    world = len(plans)
    if isinstance(plans, Rotated):  # the same numbering as on_rank
        rotations = tuple(tuple((q + r) % world for q in range(world)) for r in range(world))
        return Symmetry((0,) * world, rotations)
    if world == 1:
        return alone(world)
    forms = _Forms(plans)
    return _orbits(world, [r for r in _rotations(world) if forms.kept_by(r)])


def _rotations(world: int) -> list[Renaming]:
    """For each size of blocks of neighbouring ranks: the rotation by one block, and the rotation by
    one rank within each block.
    """
    rotations = []
    for size in (s for s in range(1, world) if world % s == 0):
        rotations.append(tuple((q + size) % world for q in range(world)))
        rotations.append(tuple(q - q % size + (q + 1) % size for q in range(world)))
    return [r for r in dict.fromkeys(rotations) if r != tuple(range(world))]


def _orbits(world: int, generators: Sequence[Renaming]) -> Symmetry:
    twin: dict[int, int] = {}
    renaming: dict[int, Renaming] = {}
    for rank in range(world):
        if rank in twin:
            continue
        twin[rank], renaming[rank] = rank, tuple(range(world))
        open_ = [rank]
        while open_:
            at = open_.pop()
            for generator in generators:
                image = generator[at]
                if image not in twin:
                    twin[image] = rank
                    renaming[image] = tuple(generator[q] for q in renaming[at])
                    open_.append(image)
    return Symmetry(tuple(twin[r] for r in range(world)), tuple(renaming[r] for r in range(world)))


class _Forms:
    """The plans of all ranks, each split into two parts: the ranks to which the plan refers, and
    all other contents without names. Comparing the parts shows whether a renaming of ranks is a
    symmetry.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.form: list[int] = []  # by rank: the first rank whose plan has equal content
        known: list[tuple[int, Any]] = []
        for rank, plan in enumerate(plans):
            content = _content(plan)
            same = (form for form, other in known if content is not None and other == content)
            self.form.append(next(same, rank))
            if self.form[-1] == rank:
                known.append((rank, content))
        self.named = _named(plans) if len(known) < len(plans) else None

    def kept_by(self, renaming: Renaming) -> bool:
        """True where renaming the ranks turns every plan into the plan of its new rank."""
        if self.named is None:
            return False
        new = np.array(renaming)
        for rank, image in enumerate(renaming):
            if self.form[rank] != self.form[image]:
                return False
            (owners, numbers), (there, others) = self.named[rank], self.named[image]
            if not (np.array_equal(new[owners], there) and np.array_equal(numbers, others)):
                return False
        return True


def _content(plan: Plan) -> Any:
    """Everything in a plan on which its verification depends, except rank numbers and names; None
    if parameters in the plan are invalid.
    """
    try:
        ops = [(o.kind, o.operands, o.after, _params(plan, o)) for o in plan.ops]
    except PlanError:
        return None
    return (
        plan.machine,
        plan.arenas,
        len(plan.meta.get("processor_ranges") or ops),
        [(b.arena, b.nbytes, b.offset, b.initial) for b in plan.buffers],
        [(t.dtype, t.shape, t.extents, t.offsets, t.buffer, t.packet) for t in plan.tensors],
        ops,
        [(c.step, c.system) for c in plan.counters],
        plan.phases,
    )


def _params(plan: Plan, op: PlanOp) -> Any:
    """The parameters of an op after ranks are renumbered so that this rank becomes rank 0."""
    kind = kinds.get(op.kind)
    read_params(op.kind, kind.params, op.params)
    return kind.on_rank(op.params, -plan.rank)


def _named(plans: Sequence[Plan]) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """Two arrays for each rank, with one entry for each buffer and counter of its plan: the rank
    that owns it, and its number in the owner's plan (-1 if the owner does not have that name). The
    result is None if a plan refers to a rank that does not exist.
    """
    tables = []
    for plan in plans:
        rows = [(b.rank, b.id, b.name) for b in plan.buffers]
        tables.append((rows, [(c.rank, c.id, c.name) for c in plan.counters]))
    everyone = (rank for pair in tables for rows in pair for rank, _, _ in rows)
    if not all(0 <= rank < len(plans) for rank in everyone):
        return None
    buffers = [
        {b.name: b.id for b in p.buffers if b.rank == p.rank and b.arena == "symmetric"}
        for p in plans
    ]
    counters = [{c.name: c.id for c in p.counters if c.rank == p.rank and c.system} for p in plans]
    pairs = []
    for plan, pair in zip(plans, tables, strict=True):
        owners, numbers = [], []
        for rows, names in zip(pair, (buffers, counters), strict=True):
            for rank, number, name in rows:
                owners.append(rank)
                numbers.append(number if rank == plan.rank else names[rank].get(name, -1))
        pairs.append((np.array(owners, np.int64), np.array(numbers, np.int64)))
    return pairs
