"""The plans of all ranks, with their references to each other and the memory that their tasks
access.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ark.errors import PlanError
from ark.plan import kind as kinds
from ark.plan.access import Region
from ark.plan.boxes import Templates
from ark.plan.kind import Access, Signature
from ark.plan.rotated import Rotated
from ark.plan.types import Plan, PlanBuffer, PlanTensor, Task
from ark.plan.verify.listing import Listing, listing
from ark.plan.verify.symmetry import Symmetry

Key = tuple[int, int]


def refuse(message: str) -> PlanError:
    return PlanError(f"the plan is refused: {message}")


@dataclass(frozen=True)
class RankSet:
    """The plans of all ranks, in rank order.

    Only the ranks in `checked` are checked. Each other rank does the same work as one checked rank,
    its twin. Its memory accesses are those of its twin with ranks renamed.
    """

    plans: Sequence[Plan]
    symmetry: Symmetry
    templates: Templates = field(default_factory=Templates)
    _checked: dict[int, Plan] = field(default_factory=dict)
    _listings: dict[Key, Listing] = field(default_factory=dict)
    _touches: dict[Key, list[list[Region]]] = field(default_factory=dict)
    _signatures: dict[int, tuple[Signature, ...]] = field(default_factory=dict)
    _named_buffers: dict[int, dict[str, int]] = field(default_factory=dict)
    _named_counters: dict[int, dict[str, int]] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return len(self.plans)

    @property
    def checked(self) -> tuple[int, ...]:
        return self.symmetry.checked

    @property
    def checked_plans(self) -> tuple[Plan, ...]:
        return tuple(self.plan_of(rank) for rank in self.checked)

    def plan_of(self, rank: int) -> Plan:
        """The plan of rank `rank`, which must be one of the checked ranks."""
        if rank not in self._checked:
            self._checked[rank] = self.plans[rank]
        return self._checked[rank]

    def plan(self, rank: int) -> Plan:
        """The plan in which a rank's buffers, counters and names can be looked up. If only rank 0's
        plan is stored, the rank numbers in the result are those of rank 0's plan.
        """
        return self.plans.first if isinstance(self.plans, Rotated) else self.plans[rank]

    def first_bytes(self, tensor: PlanTensor) -> list[int]:
        """For one tensor of a checked rank, the byte in its buffer at which it begins. The list has
        one entry for each rank that does the same work as the checked rank.
        """
        if not isinstance(self.plans, Rotated):
            return [tensor.first_byte]
        return [there.first_byte for there in self.plans.everywhere(tensor)]

    def signatures(self, rank: int) -> tuple[Signature, ...]:
        """For each op of a checked rank's plan, its signature: kind, parameters and operand
        types.
        """
        if rank not in self._signatures:
            plan = self.plan_of(rank)
            self._signatures[rank] = tuple(kinds.signature(plan, op) for op in plan.ops)
        return self._signatures[rank]

    def accesses(self, rank: int, task: Task) -> list[Access]:
        """The accesses of a task."""
        op = self.plan(rank).ops[task.op]
        twin = self.symmetry.twin[rank]
        return kinds.get(op.kind).accesses(self.signatures(twin)[task.op], task.coord)

    def buffer_of(self, rank: int, buffer: int) -> Key:
        """The memory to which a buffer entry of a checked rank's plan refers, as (owning rank,
        buffer id in the owner's plan). The id is -1 if the owner's plan does not have the buffer.
        """
        entry = self.plan_of(rank).buffers[buffer]
        if entry.rank == rank:
            return rank, buffer
        if entry.rank not in self._named_buffers:
            plan = self.plan(entry.rank)
            local = (b for b in plan.buffers if b.rank == plan.rank and b.arena == "symmetric")
            self._named_buffers[entry.rank] = {b.name: b.id for b in local}
        return entry.rank, self._named_buffers[entry.rank].get(entry.name, -1)

    def counter_of(self, rank: int, counter: int) -> Key:
        """The counter to which a counter entry of a checked rank's plan refers, as (owning rank,
        counter id in the owner's plan). The id is -1 if the owner's plan does not have the counter.
        """
        entry = self.plan_of(rank).counters[counter]
        if entry.rank == rank:
            return rank, counter
        if entry.rank not in self._named_counters:
            plan = self.plan(entry.rank)
            local = (c for c in plan.counters if c.rank == plan.rank and c.system)
            self._named_counters[entry.rank] = {c.name: c.id for c in local}
        return entry.rank, self._named_counters[entry.rank].get(entry.name, -1)

    def listing(self, rank: int, number: int) -> Listing:
        """The tasks of a rank's phase as arrays. If the rank is not checked, these are the tasks of
        its twin, the checked rank that does the same work.
        """
        key = (self.symmetry.twin[rank], number)
        if key not in self._listings:
            self._listings[key] = listing(self.plan_of(key[0]).phases[number])
        return self._listings[key]

    def touches(self, rank: int, number: int) -> list[list[Region]]:
        """The memory accesses of each op of a phase, in program order. Buffers are identified as in
        the plan of the accessing rank. Tasks are numbered from 0 within the op. If the memory
        belongs to a peer, `space` is None and bytes are counted from the buffer's start. For a rank
        that is not checked, the accesses are those of its twin, the checked rank that does the same
        work.
        """
        key = (self.symmetry.twin[rank], number)
        if key not in self._touches:
            plan = self.plan_of(key[0])
            listed = self.listing(*key)
            self._touches[key] = [
                self._regions(plan, op, coords) for op, (_, coords) in listed.by_op.items()
            ]
        return self._touches[key]

    def _regions(
        self, plan: Plan, number: int, coords: tuple[tuple[int, ...], ...]
    ) -> list[Region]:
        op = plan.ops[number]
        sig = self.signatures(plan.rank)[number]
        touched = [(b, op.operands[b.operand], False) for b in self.templates.boxes(sig, coords)]
        for id_ in op.after:
            tensor = plan.tensors[id_]
            whole = self.templates.whole(tensor.items, tensor.itemsize, len(coords))
            touched.append((whole, id_, True))
        regions = []
        for boxes, id_, pretended in touched:
            tensor = plan.tensors[id_]
            buffer = plan.buffers[tensor.buffer]
            local = buffer.rank == plan.rank
            regions.append(
                Region(
                    number,
                    boxes,
                    space_of(buffer) if local else None,
                    tensor.buffer,
                    tensor.items.extents,
                    tensor.items.offsets,
                    (buffer.offset if local else 0) + tensor.first_byte,
                    tensor.packet,
                    pretended,
                )
            )
        return regions

    def owner_of(self, rank: int, region: Region) -> int:
        """The rank that owns the memory in a region, where `rank` accesses memory of a peer."""
        twin = self.symmetry.twin[rank]
        owner, _ = self.buffer_of(twin, int(region.memory))  # type: ignore[call-overload]
        return self.symmetry.renaming[rank][owner]

    def seen_by_owner(self, owner: int, rank: int, region: Region) -> Region:
        """The access `region` of a rank to a peer's memory, with the buffer and byte offsets of the
        peer's plan.
        """
        twin = self.symmetry.twin[rank]
        _, number = self.buffer_of(twin, int(region.memory))  # type: ignore[call-overload]
        buffer = self.plan(owner).buffers[number]
        return replace(
            region, space=space_of(buffer), memory=number, base=region.base + buffer.offset
        )


def space_of(buffer: PlanBuffer) -> tuple[str, int]:
    """A key for the address space of a buffer on its rank. Buffers with the same key may overlap.
    Each buffer of the caller has its own address space.
    """
    return buffer.arena, buffer.id if buffer.arena == "external" else -1
