"""A task kind that waits until peers have written into this rank's memory, and moves no data.
Emitted by ark.lower.ops.communication.overlapped.

operands: one tensor of one dense dimension.

coord: the first element that peers write, and the last element + 1. No params.

The plan lists this task as the writer of the elements. So tasks that read them are ordered after
this task, and thus after its waits for the peers' signals.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import Places, count, is_dense, need
from ark.tasks import text


class Arrival(TaskKind):
    name = "arrival"

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 1)
        operand = sig.operands[0]
        need(
            len(operand.shape) == 1 and is_dense(operand),
            f"the operand has shape {list(operand.shape)}, expected one dense dimension",
        )

    def places(self, sig: Signature) -> Places:
        return Places((range(0, sig.operands[0].shape[0]),), span=True)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        begin, end = coord
        return [Access(0, (begin,), (end,), write=True)]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        return text.function(name, "  (void)t;\n")


register(Arrival())
