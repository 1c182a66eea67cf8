"""The plans of all ranks, with what they refer to on each other, and what their tasks touch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ark.errors import PlanError
from ark.ir.dtype import by_name
from ark.plan import kind as kinds
from ark.plan.access import Region
from ark.plan.boxes import Templates
from ark.plan.kind import Access, Signature
from ark.plan.types import SHARED, Plan, PlanBuffer, Task
from ark.plan.verify.listing import Listing, listing

Key = tuple[int, int]


def refuse(message: str) -> PlanError:
    return PlanError(f"the plan is refused: {message}")


@dataclass(frozen=True)
class RankSet:
    """The plans of all ranks, in rank order.

    Ranks whose plans differ only in whom they name as peers have the same obligations in their own
    memory: `twin` says which rank's stand for a rank's. That they are met is checked on every rank.
    """

    plans: tuple[Plan, ...]
    templates: Templates = field(default_factory=Templates)
    _listings: dict[int, Listing] = field(default_factory=dict)
    _touches: dict[Key, list[list[Region]]] = field(default_factory=dict)

    @cached_property
    def signatures(self) -> tuple[tuple[Signature, ...], ...]:
        """By rank and op."""
        return tuple(tuple(kinds.signature(p, op) for op in p.ops) for p in self.plans)

    @cached_property
    def twin(self) -> tuple[int, ...]:
        """By rank the first rank whose plan is the same but for names and peers."""
        found: list[int] = []
        for rank, plan in enumerate(self.plans):
            same = (r for r in sorted(set(found)) if _isomorphic(self.plans[r], plan))
            found.append(next(same, rank))
        return tuple(found)

    def accesses(self, rank: int, task: Task) -> list[Access]:
        """What the task touches."""
        op = self.plans[rank].ops[task.op]
        return kinds.get(op.kind).accesses(self.signatures[rank][task.op], task.coord)

    def buffer_of(self, rank: int, buffer: int) -> Key:
        """(rank, buffer id) of the memory that a plan's buffer entry names."""
        entry = self.plans[rank].buffers[buffer]
        if entry.rank == rank:
            return rank, buffer
        return entry.rank, self._named_buffers[entry.rank].get(entry.name, -1)

    def counter_of(self, rank: int, counter: int) -> Key:
        """(rank, counter id) of the counter that a plan's entry names."""
        entry = self.plans[rank].counters[counter]
        if entry.rank == rank:
            return rank, counter
        return entry.rank, self._named_counters[entry.rank].get(entry.name, -1)

    @cached_property
    def _named_buffers(self) -> tuple[dict[str, int], ...]:
        return tuple(
            {b.name: b.id for b in p.buffers if b.rank == p.rank and b.arena in SHARED}
            for p in self.plans
        )

    @cached_property
    def _named_counters(self) -> tuple[dict[str, int], ...]:
        return tuple(
            {c.name: c.id for c in p.counters if c.rank == p.rank and c.system} for p in self.plans
        )

    def listing(self, rank: int, number: int) -> Listing:
        """The arrays of a rank's phase; ranks that share the phase share them."""
        phase = self.plans[rank].phases[number]
        if id(phase) not in self._listings:
            self._listings[id(phase)] = listing(phase)
        return self._listings[id(phase)]

    def touches(self, rank: int, number: int) -> list[list[Region]]:
        """What each op of a phase touches, in program order, in the toucher's names.

        Tasks are counted as in the op's list of nodes. Where memory is a peer's, `space` is None
        and bytes count from the buffer's start.
        """
        key = (self.twin[rank], number)
        if key not in self._touches:
            plan = self.plans[key[0]]
            listed = self.listing(*key)
            self._touches[key] = [
                self._regions(plan, op, coords) for op, (_, coords) in listed.by_op.items()
            ]
        return self._touches[key]

    def _regions(
        self, plan: Plan, number: int, coords: tuple[tuple[int, ...], ...]
    ) -> list[Region]:
        op = plan.ops[number]
        sig = self.signatures[plan.rank][number]
        found = [(b, op.operands[b.operand], False) for b in self.templates.boxes(sig, coords)]
        for id_ in op.after:
            tensor = plan.tensors[id_]
            itemsize = 8 if tensor.packet else by_name(tensor.dtype).itemsize
            whole = self.templates.whole(tensor.shape, tensor.extents, itemsize, len(coords))
            found.append((whole, id_, True))
        made = []
        for boxes, id_, pretended in found:
            tensor = plan.tensors[id_]
            buffer = plan.buffers[tensor.buffer]
            own = buffer.rank == plan.rank
            made.append(
                Region(
                    number,
                    boxes,
                    space_of(buffer) if own else None,
                    tensor.buffer,
                    tensor.extents,
                    tensor.offsets,
                    (buffer.offset if own else 0) + tensor.start * boxes.itemsize,
                    tensor.packet,
                    pretended,
                )
            )
        return made

    def seen_by_owner(self, rank: int, region: Region) -> tuple[int, Region]:
        """(owner, region) of a touch of a peer's memory, as its owner counts bytes."""
        owner, number = self.buffer_of(rank, int(region.memory))  # type: ignore[call-overload]
        buffer = self.plans[owner].buffers[number]
        moved = replace(
            region, space=space_of(buffer), memory=number, base=region.base + buffer.offset
        )
        return owner, moved


def space_of(buffer: PlanBuffer) -> tuple[str, int]:
    """Buffers of a rank in one space may overlap; external ones are spaces of their own."""
    return buffer.arena, buffer.id if buffer.arena == "external" else -1


def _isomorphic(a: Plan, b: Plan) -> bool:
    """Do two ranks' plans differ in nothing but names, and in who their peers are?"""

    def memory(plan: Plan) -> list[Sequence[object]]:
        own = [(b.arena, b.nbytes, b.offset, b.initial, b.rank == plan.rank) for b in plan.buffers]
        seen = [(t.dtype, t.shape, t.extents, t.offsets, t.buffer, t.packet) for t in plan.tensors]
        return [*own, *seen]

    return (
        len(a.ops) == len(b.ops)
        and all(
            (x.kind, x.operands, x.after, x.params) == (y.kind, y.operands, y.after, y.params)
            for x, y in zip(a.ops, b.ops, strict=True)
        )
        and memory(a) == memory(b)
        and a.machine == b.machine
        and a.arenas == b.arenas
        and a.phases == b.phases
    )
