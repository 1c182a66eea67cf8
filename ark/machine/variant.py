"""Kernel variants: how a block of the loop kernel shares its work among warps.

A machine model says what the hardware is; a variant says how one kernel uses it: which warps load,
compute and communicate, with how many registers, and what shape the operand stream's ring has. A
backend lists the variants that its machines can run, the lowering chooses one, the plan carries it
(docs/loop-kernel.md). Called by ark.plan and the backends.
"""

from __future__ import annotations

from dataclasses import dataclass

from ark.machine.ranges import Few, StageBytes, Threads, Word

LOAD, COMPUTE, COMMUNICATE, MOVE = "load", "compute", "communicate", "move"


@dataclass(frozen=True)
class Role:
    """Warps of a block that do one kind of work.

    name: `compute`, `load`, `communicate` or `move`; moving warps have their own task list, of
    copies and sums, beside the processor's. warps: how many. registers: per thread of these warps
    where the hardware can divide them, 0 for what the compiler gives.
    """

    name: Word
    warps: Threads
    registers: Few = 0


@dataclass(frozen=True)
class Variant:
    """A form of the loop kernel.

    name: `block`, or what else a backend offers. roles: the computing warps first; they have the
    lowest thread numbers. stages: slots of the ring in shared memory, 0 where operands are read in
    place. stage_bytes: largest single fetch into a slot. in_flight: fetches outstanding at once per
    processor. row_slice: elements of a single input row that a computing thread can keep in
    registers over a linear task; 0 where it cannot. most_rows: input rows of a linear layer for
    which a thread's registers suffice; 0 for any number.
    """

    name: Word
    roles: tuple[Role, ...]
    stages: Few = 0
    stage_bytes: StageBytes = 16384
    in_flight: Threads = 2
    row_slice: Few = 0
    most_rows: Few = 0

    @property
    def ring_bytes(self) -> int:
        """Shared memory that the ring takes."""
        return self.stages * self.stage_bytes

    @property
    def warps(self) -> int:
        """All warps of a block."""
        return sum(role.warps for role in self.roles)

    def role(self, name: str) -> int:
        """Warps of the role, 0 if the variant has none."""
        return sum(role.warps for role in self.roles if role.name == name)

    def registers(self, name: str) -> int:
        """Registers of a thread of the role, 0 for what the compiler gives."""
        return max((role.registers for role in self.roles if role.name == name), default=0)


def block(warps: int, load: int = 0, **ring: int) -> Variant:
    """The variant in which all computing warps share each task and a task ends with a block-level
    hand-over. load: warps that only fetch.
    """
    roles = (Role(COMPUTE, warps), *((Role(LOAD, load),) if load else ()))
    return Variant("block", roles, **ring)
