"""Copies to a peer GPU by loads that write LDS directly; bulk.h has the device code. Called by the
source writer through the dialect.
"""

from __future__ import annotations

from ark.backend.codegen.body import Body
from ark.ir.dtype import by_name
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks import text
from ark_rocm.tasks.headers import read

MOST_SLOTS = 8  # pieces of a wave


def _slots(machine: Machine) -> int:
    """The number of LDS pieces (buffers) of each wave. 0 if the machine's loads cannot write LDS
    directly.
    """
    if not machine.has(Capability.PEER_BULK):
        return 0
    room = machine.shared_bytes // (machine.warps * _piece(machine))
    return min(MOST_SLOTS, room // 2 * 2)


def _piece(machine: Machine) -> int:
    return 16 * machine.lanes


class Bulk(Body):
    """The body of the task kind `bulk`: copies to a peer through LDS, without registers for the
    loads.
    """

    kind = "bulk"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return _slots(machine) > 0

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return _slots(machine) * machine.warps * _piece(machine)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        constants = (by_name(sig.operands[0].dtype).itemsize, _slots(machine))
        return text.call(name, "ark_bulk", constants, [text.address(sig, 0), text.address(sig, 1)])

    def headers(self, machine: Machine) -> tuple[str, ...]:
        return read("bulk.h")
