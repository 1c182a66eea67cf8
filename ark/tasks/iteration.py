"""The task kind `iteration_end`: the last task of an iteration, which computes nothing, waits for
all other tasks and opens the next iteration. Emitted by ark.lower.pipeline.

A plan has this task if its last op has several tiles. Without the task, one of these tiles would
have to wait for all the others before it opens the next iteration, and a short op would take twice
as long. The task has no operands and no params.
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
