"""The body of the task kind `bulk`: copies to a peer by the bulk copy unit, through shared memory.
bulk.h has the device code, bulk_copies.h the copies themselves.
"""

from __future__ import annotations

from ark.backend.codegen.body import Body
from ark.ir.dtype import by_name
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks import text
from ark_cuda.tasks import inline

SLOTS, MOST_SLOT, LEAST_SLOT = 4, 16384, 2048  # slots, and bytes of one
BARRIER_BYTES = 384  # bytes: barriers, and room to begin at a multiple of 128


def _slot(machine: Machine) -> int:
    """Bytes of one of the body's slots in shared memory, or 0 if slots would be too small to gain
    anything.
    """
    if not machine.has(Capability.PEER_BULK):
        return 0
    room = (machine.task_bytes - BARRIER_BYTES) // SLOTS // 1024 * 1024
    return min(MOST_SLOT, room) if room >= LEAST_SLOT else 0


class Bulk(Body):
    """The body of the task kind `bulk`, which copies by the bulk copy unit."""

    kind = "bulk"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return _slot(machine) > 0

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return _slot(machine) * SLOTS + BARRIER_BYTES

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        constants = (by_name(sig.operands[0].dtype).itemsize, SLOTS, _slot(machine))
        return text.call(name, "ark_bulk", constants, [text.address(sig, 0), text.address(sig, 1)])

    def headers(self, machine: Machine) -> tuple[str, ...]:
        return tuple(map(inline.header, ("bulk_copies.h", "bulk.h")))
