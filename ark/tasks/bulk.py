"""The task kind `bulk`, a copy to a peer by hardware that copies large contiguous pieces through
shared memory, so that few threads keep many bytes in flight. Emitted for the engine `bulk`
(ark.lower.engines).

operands: source, target, both plain memory of one dense dimension and one type. params and coord
are those of the kind `combine`, whose device function is used by backends without one for `bulk`.
"""

from __future__ import annotations

from ark.plan.kind import Signature, register
from ark.plan.params import count, need
from ark.tasks.combine import Combine


class Bulk(Combine):
    name = "bulk"

    def check(self, sig: Signature) -> None:
        count(sig, 2)
        super().check(sig)
        need(
            not any(o.packet for o in sig.operands),
            "packets are not supported; expected plain memory",
        )

    def packets(self, sig: Signature) -> frozenset[int]:
        return frozenset()


register(Bulk())
