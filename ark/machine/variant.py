"""Kernel variants: how a block of the loop kernel divides its work among warps.

A machine model describes the hardware. A variant describes how a kernel uses it: which warps load,
compute and communicate, with how many registers, and the size of the operand stream's ring. A
backend lists the variants that its machines can run, the lowering chooses one, and the plan
contains it (docs/loop-kernel.md). Called by ark.plan and the backends.
"""

from __future__ import annotations

from dataclasses import dataclass

from ark.machine.ranges import Few, StageBytes, Threads, Word

LOAD, COMPUTE, COMMUNICATE, MOVE = "load", "compute", "communicate", "move"


@dataclass(frozen=True)
class Role:
    """A role: the warps of a block that do one kind of work.

    name: `compute`, `load`, `communicate` or `move`. Moving warps execute a task list of their own,
        of copies and sums, beside the processor's.
    warps: how many.
    registers: per thread of these warps, on hardware that can assign them by warp; 0 leaves the
        number to the compiler.
    """

    name: Word
    warps: Threads
    registers: Few = 0


@dataclass(frozen=True)
class Variant:
    """A form of the loop kernel.

    name: `block`, or another name that a backend defines.
    roles: the computing warps come first; they have the lowest thread numbers.
    stages: slots of the ring in shared memory; 0 if operands are read in place.
    stage_bytes: the largest single fetch into a slot.
    in_flight: fetches outstanding at once per processor.
    row_slice: elements of a single input row that a computing thread can keep in registers
        throughout a linear task; 0 if it keeps none.
    most_rows: input rows of a linear layer for which a thread's registers suffice; 0 for any
        number.
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
        """The number of warps of the role; 0 if the variant has none."""
        return sum(role.warps for role in self.roles if role.name == name)

    def registers(self, name: str) -> int:
        """Registers per thread of the role; 0 if the compiler decides."""
        return max((role.registers for role in self.roles if role.name == name), default=0)


def block(warps: int, load: int = 0, **ring: int) -> Variant:
    """The variant in which all computing warps share each task, and a task ends with a
    synchronisation of the block. load: the number of warps that only fetch.
    """
    roles = (Role(COMPUTE, warps), *((Role(LOAD, load),) if load else ()))
    return Variant("block", roles, **ring)
