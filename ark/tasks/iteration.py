"""The last task of an iteration, which computes nothing and runs after all others.

It waits until the whole iteration has ended, and opens the next one. It is a task of its own if the
last op has several tiles: if one of these tiles waited for all the others, a short op would take
twice as long. No operands, no params. Emitted by ark.lower.pipeline.
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
