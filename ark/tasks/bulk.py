"""A copy to a peer in large pieces by a processor's copy hardware. Data passes through shared
memory, so that few threads keep many bytes in flight.

operands: source, target, both plain memory of one dense dimension and one type. params and coord as
in `combine`; a backend without a body of its own uses combine's. Emitted for the engine `bulk`
(ark.lower.engines).
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
