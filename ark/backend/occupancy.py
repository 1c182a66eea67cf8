"""Calculates how many blocks of a compiled kernel fit on a processor at the same time, and what
limits their number.

A backend reads the registers and spills of a binary and states the limits of its processors; the
calculation is the same for all vendors. Called by `ark emit --binary`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessorLimits:
    """The resources of a processor.

    files: the number of vector register files; each one serves its own warps. registers: registers
    per lane in one register file. granule: registers are allocated to a warp in multiples of this
    number. warps: the most warps per register file. shared_bytes: shared memory of the processor.
    shared_granule: shared memory is allocated to a block in multiples of this many bytes.
    block_bytes: shared memory that the system reserves for each block besides the block's own.
    """

    files: int
    registers: int
    granule: int
    warps: int
    shared_bytes: int
    shared_granule: int
    block_bytes: int = 0


@dataclass(frozen=True)
class Used:
    """The resources that a binary needs. registers: vector registers per lane, accumulators
    included.

    scalar_registers: scalar registers per warp; 0 if the architecture has none. spills: vector
    registers per lane that are kept in memory; scalar_spills: scalar registers kept in lanes of
    vector registers. scratch_bytes: stack memory per lane. shared_bytes: static shared memory of a
    block.
    """

    registers: int
    accumulators: int = 0
    scalar_registers: int = 0
    spills: int = 0
    scalar_spills: int = 0
    scratch_bytes: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True)
class Occupancy:
    """The number of blocks of a kernel that fit on a processor at once, and the resource that
    limits it.

    shared_bytes: static and dynamic shared memory of one block. warps: the warps of all these
    blocks. most_warps: the most warps of the processor.
    """

    used: Used
    shared_bytes: int
    blocks: int
    limit: str
    warps: int
    most_warps: int

    def __str__(self) -> str:
        used = self.used
        words = [f"{used.registers} vector registers a lane"]
        if used.accumulators:
            words[0] += f" ({used.accumulators} of them accumulators)"
        if used.scalar_registers:
            words.append(f"{used.scalar_registers} scalar registers a warp")
        spilled = f"{used.spills} spilled"
        if used.scalar_spills:
            spilled += f" (and {used.scalar_spills} scalar ones, to vector registers)"
        words += [spilled, f"{used.scratch_bytes} bytes of scratch a lane"]
        words.append(f"{self.shared_bytes:,} bytes of shared memory a block")
        if not self.blocks:
            return ", ".join(words) + f"; no block fits a processor: not enough {self.limit}"
        fit = f"{self.blocks} block{'s' * (self.blocks > 1)}"
        share = f"{self.warps} of {self.most_warps} warps"
        return ", ".join(words) + f"; {fit} a processor ({share}), limited by {self.limit}"


def _up(value: int, granule: int) -> int:
    return -(-value // granule) * granule


def occupancy(used: Used, limits: ProcessorLimits, warps: int, dynamic_bytes: int) -> Occupancy:
    """The occupancy of a kernel that is launched with this many warps and bytes of dynamic shared
    memory per block.
    """
    shared = used.shared_bytes + dynamic_bytes
    by_registers = limits.files * (limits.registers // _up(max(used.registers, 1), limits.granule))
    most = limits.files * limits.warps
    taken = _up(shared, limits.shared_granule) + limits.block_bytes
    fits = {
        "registers": by_registers // warps,
        "warps": most // warps,
        "shared memory": limits.shared_bytes // taken if taken else most // warps,
    }
    blocks = min(fits.values())
    limit = " and ".join(name for name, count in fits.items() if count == blocks)
    return Occupancy(used, shared, blocks, limit, blocks * warps, most)
