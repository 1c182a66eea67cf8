"""Says that what tasks before it on its processor have stored is there: a task that computes
nothing and signals.

A signal waits until all that was stored before it has arrived, over a link too. A task that signals
itself keeps its processor waiting for that; with one of these behind the next task, what it stored
travels meanwhile. No operands. params: tasks, how many there are. coord: (number,). Emitted by
ark.ops.bands.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import Params, Places, Size, count
from ark.tasks import text


class TellParams(Params, frozen=True):
    tasks: Size


class Tell(TaskKind):
    name = "tell"
    params = TellParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 0)

    def places(self, sig: Signature) -> Places:
        return Places((range(sig.params["tasks"]),))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        return []

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        return text.function(name, "  (void)t;\n")


register(Tell())
