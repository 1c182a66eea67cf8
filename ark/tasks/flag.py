"""The task kind `flag`, which moves no data: it signals a channel between two ranks or waits for
one. Emitted by ark.lower.ops.communication.channels.

Its output is a single uint32, to which the task writes the number of the iteration. An op that must
run after the wait depends on this output. There are no params, and coord is always 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import Places, count, need
from ark.tasks import text


class Flag(TaskKind):
    name = "flag"

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 1)
        operand = sig.operands[0]
        need(
            (operand.dtype, operand.shape) == ("uint32", (1,)),
            f"the output is {operand.dtype}{list(operand.shape)}, expected uint32[1]",
        )

    def places(self, sig: Signature) -> Places:
        return Places((range(1),))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        return [Access(0, (0,), (1,), write=True)]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        body = text.operand(sig, 0, "token", const=False)
        return text.function(name, body + "  if (ark_tid() == 0) *token = c.iteration + 1u;\n")


register(Flag())
