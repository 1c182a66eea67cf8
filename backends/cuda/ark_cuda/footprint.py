"""Reads the resources of a cubin's loop kernel: registers, spills and shared memory.

The figures are in ptxas' log, which the compiler stores with the cubin. Called by ark_cuda.__init__
for `ark emit --binary`.
"""

from __future__ import annotations

import re

from ark.backend.occupancy import Occupancy, ProcessorLimits, Used, occupancy
from ark.backend.protocol import Target
from ark.errors import SystemError

KERNEL = "ark_loop"
REGISTER_BYTES = 4
# For each compute capability, the size of a multiprocessor's shared memory in KiB and its largest
# number of resident warps (CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability").
MULTIPROCESSORS = {
    "80": (164, 64),
    "86": (100, 48),
    "87": (164, 48),
    "89": (100, 48),
    "90": (228, 64),
    "100": (228, 64),
    "103": (228, 64),
    "110": (228, 48),
    "120": (100, 48),
    "121": (100, 48),
}
BLOCK_SHARED_BYTES = 1024  # bytes of shared memory that the driver takes for each block


def limits(arch: str) -> ProcessorLimits:
    """The limits of a multiprocessor of the architecture. Raises SystemError if they are not listed
    here.
    """
    capability = arch.removeprefix("sm_").rstrip("af")
    if capability not in MULTIPROCESSORS:
        raise SystemError(
            f"the limits of a multiprocessor of {arch} are unknown; add them to MULTIPROCESSORS in "
            "ark_cuda/footprint.py"
        )
    kibibytes, warps = MULTIPROCESSORS[capability]
    return ProcessorLimits(4, 512, 8, warps // 4, kibibytes << 10, 128, BLOCK_SHARED_BYTES)


def used(log: str, kernel: str = KERNEL) -> Used:
    """The resources of a kernel according to ptxas' log. Raises SystemError if the log does not
    list them.
    """
    registers = re.search(
        rf"Function properties for {kernel}\n[^\n]*?(\d+) bytes stack frame, (\d+) bytes spill "
        r"stores[^\n]*\n[^\n]*Used (\d+) registers([^\n]*)",
        log,
    )
    if registers is None:
        raise SystemError(f"the compiler's log has no figures of {kernel!r}:\n{log[:500]}")
    stack, spilled, count, rest = registers.groups()
    cumulative = re.search(r"(\d+) bytes cumulative stack size", rest)
    shared = re.search(r"(\d+) bytes smem", rest)
    return Used(
        registers=int(count),
        spills=-(-int(spilled) // REGISTER_BYTES),
        scratch_bytes=int(cumulative[1] if cumulative else stack),
        shared_bytes=int(shared[1]) if shared else 0,
    )


def occupancy_of(log: str, target: Target, dynamic_bytes: int) -> Occupancy:
    """The occupancy of the loop kernel; see ark.backend.protocol.OccupancyBackend."""
    return occupancy(used(log), limits(target.arch), -(-target.threads // 32), dynamic_bytes)
