"""A sum of all ranks' shares that the switch computes and stores on all ranks.

operands: a share of each rank, then a result at each, the own ones first; plain memory of one dense
dimension. params and coord: as for combine, whose body it has where no switch is mapped. A switch
adds in an order of its own, so its sums are the same on all ranks, not those of rank order. Emitted
for the engine `switch` (ark.lower.engines).
"""

from __future__ import annotations

from ark.plan.kind import Signature, register
from ark.plan.params import need
from ark.tasks.combine import Combine, CombineParams, outputs, shares


class Switch(Combine):
    name = "switch"

    def check(self, sig: Signature) -> None:
        super().check(sig)
        params = sig.read(CombineParams)
        need(outputs(sig) == shares(sig), "it needs one share and one result for each rank")
        need(params.op == "sum", f"a switch supports op sum only, got {params.op}")
        need(params.divide == 1, "a switch does not support divide")
        need(not any(o.packet for o in sig.operands), "a switch does not support packets")

    def packets(self, sig: Signature) -> frozenset[int]:
        return frozenset()


register(Switch())
