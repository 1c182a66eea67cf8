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
    """The warps of a block that have the same function.

    name: `compute`, `load`, `communicate` or `move`. Moving warps execute a separate task list of
        copies and sums, concurrently with the computing warps.
    warps: the number of these warps.
    registers: registers per thread of these warps, on hardware that can assign them by warp; 0 if
        the compiler decides.
    """

    name: Word
    warps: Threads
    registers: Few = 0


@dataclass(frozen=True)
class Variant:
    """A variant of the loop kernel, the persistent kernel that runs a plan. It differs from others
    in how it divides the warps of a block.

    name: `block`, or another name that a backend defines.
    roles: the roles of its warps. The computing warps are first and have the lowest thread numbers.
    stages: the number of stages (equal slots) of the ring, the circular buffer in shared memory
        into which operands are copied ahead of tasks; 0 if there is no ring, so that tasks read
        operands from global memory.
    stage_bytes: the size of a stage in bytes.
    in_flight: the number of stages that may be in the process of being copied at once, per
        processor.
    row_slice: the number of elements of an input row that a computing thread keeps in registers
        during a linear task of one row; 0 if it keeps none.
    most_rows: the largest number of input rows of a linear layer for which the registers of a
        thread suffice; 0 if there is no limit.
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
        """The size in bytes of the ring, the circular buffer in shared memory for operands that are
        copied ahead of tasks.
        """
        return self.stages * self.stage_bytes

    @property
    def warps(self) -> int:
        """The number of warps of a block, of all roles."""
        return sum(role.warps for role in self.roles)

    def role(self, name: str) -> int:
        """The number of warps that have the given role (compute, load, communicate or move); 0 if
        the variant has none.
        """
        return sum(role.warps for role in self.roles if role.name == name)

    def registers(self, name: str) -> int:
        """Registers per thread of the warps that have the given role; 0 if the compiler decides."""
        return max((role.registers for role in self.roles if role.name == name), default=0)


def block(warps: int, load: int = 0, **ring: int) -> Variant:
    """The variant `block`: all computing warps run each task together and synchronise at its end.

    warps: the number of computing warps. load: the number of loading warps. ring: further fields
    of Variant.
    """
    roles = (Role(COMPUTE, warps), *((Role(LOAD, load),) if load else ()))
    return Variant("block", roles, **ring)
