"""Copies to a peer by the bulk copy unit, through shared memory; bulk.h has the device side,
bulk_copies.h the copies themselves."""

from __future__ import annotations

from ark.ir.dtype import by_name
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks import text
from ark_cuda.tasks import inline

SLOTS, MOST_SLOT, LEAST_SLOT = 4, 16384, 2048  # slots, and bytes of one
APART = 384  # bytes: barriers, and room to begin at a multiple of 128


def _slot(machine: Machine) -> int:
    """Bytes of a slot; 0 where they would be too few to gain anything."""
    if not machine.has(Capability.PEER_BULK):
        return 0
    room = (machine.shared_bytes - machine.ring_bytes - APART) // SLOTS // 1024 * 1024
    return min(MOST_SLOT, room) if room >= LEAST_SLOT else 0


def scratch(sig: Signature, machine: Machine) -> int:
    """Shared memory, in bytes."""
    slot = _slot(machine)
    return slot * SLOTS + APART if slot else 0


def write(name: str, sig: Signature, machine: Machine) -> str | None:
    """The body's source, or None where the common body serves."""
    slot = _slot(machine)
    if not slot:
        return None
    constants = (by_name(sig.operands[0].dtype).itemsize, SLOTS, slot)
    return text.call(name, "ark_bulk", constants, [text.address(sig, 0), text.address(sig, 1)])


def headers(machine: Machine) -> tuple[str, ...]:
    """The device code that the bodies stand on."""
    files = ("bulk_copies.h", "bulk.h") if _slot(machine) else ()
    return tuple(map(inline.header, files))
