"""What a product stores late has arrived: a task behind it on the same processor, which waits for
the copies that the product's task left under way, and moves nothing.

operands: the product's output and its copies. params: tile (rows, columns). coord: the product's.
To the plan it writes them: who reads them comes after it. Emitted by ark.ops.overlapped where the
product has the param `late` (ark.tasks.matmul); ark.plan.verify.late has what must hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.ir.fold import fold, unfold
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import Params, Places, Size, box, need
from ark.tasks import text


class LandedParams(Params, frozen=True):
    tile: tuple[Size, Size]


class Landed(TaskKind):
    name = "landed"
    params = LandedParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        need(bool(sig.operands) and len(sig.operands[0].shape) >= 2, "it has no matrix")
        need(len({o.shape for o in sig.operands}) == 1, "its operands differ in shape")

    def places(self, sig: Signature) -> Places:
        shape = fold(sig.operands[0].shape)
        return box(shape, (1, 1, *sig.params["tile"]))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        shape = sig.operands[0].shape
        rows, columns = sig.params["tile"]
        ends = min(coord[2] + rows, shape[-2]), min(coord[3] + columns, shape[-1])
        lo, hi = unfold(shape, coord, (coord[0] + 1, coord[1] + 1, *ends))
        return [Access(i, lo, hi, write=True) for i in range(len(sig.operands))]

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        return 0.0, 0.0

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        return text.function(name, "  (void)t;\n")


register(Landed())
