"""The task kind `switch`: a sum over ranks that the network switch computes and stores on all
ranks. Emitted for the engine `switch` (ark.lower.engines).

operands: the share of each rank, then the result on each rank, this rank's first in both; plain
memory of one dense dimension. params and coord are those of `combine`, whose device function is
used if no switch is mapped. A switch adds in its own order. So its sums are equal on all ranks, but
may differ from sums in rank order.
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
        need(outputs(sig) == shares(sig), "a switch needs one share and one result for each rank")
        need(params.op == "sum", f"a switch supports op sum only, got {params.op}")
        need(params.divide == 1, "a network switch needs divide=1, because it does not divide sums")
        need(not any(o.packet for o in sig.operands), "a network switch does not support packets")

    def packets(self, sig: Signature) -> frozenset[int]:
        return frozenset()


register(Switch())
