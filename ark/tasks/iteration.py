"""The end of an iteration: a task that computes nothing and comes after everything else.

The last task of an iteration waits for the whole iteration before it begins, and opens the next
one. Where the last op has several tiles that task is none of them: a tile that began only when all
the others had ended would double the time of a short op. No operands, no params. Emitted by
ark.lower.pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import Places, count
from ark.tasks import text


class IterationEnd(TaskKind):
    name = "iteration_end"

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 0)

    def places(self, sig: Signature) -> Places:
        return Places((range(1),))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        return []

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        return text.function(name, "  (void)t;\n")


register(IterationEnd())
