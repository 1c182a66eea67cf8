"""A task that moves no data: it signals a channel or waits for one.

Its output, a single uint32, is a token: an op that must come after the wait has the token as a
dependence. The task writes the number of the iteration to it. No params; coord: always 0. Emitted
by ark.ops.communication.channels.
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
            f"the token is {operand.dtype}{list(operand.shape)}, expected uint32[1]",
        )

    def places(self, sig: Signature) -> Places:
        return Places((range(1),))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        return [Access(0, (0,), (1,), write=True)]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        body = text.operand(sig, 0, "token", const=False)
        return text.function(name, body + "  if (ark_tid() == 0) *token = c.iteration + 1u;\n")


register(Flag())
