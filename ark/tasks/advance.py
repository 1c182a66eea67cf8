"""The task kind `advance`. Its task ends an iteration that processed a chunk of a prompt, by adding
the number of the chunk's tokens to the sequence's position. operands: settings, position, and
optionally the word `leave` (ark.tasks.sequences), by which the host ends the launch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import Params, Places, Rows, count, shaped
from ark.tasks import text
from ark.tasks.tokens import HEADERS, SETTINGS


def leaving(name: str, sig: Signature, index: int, call: str) -> str:
    """The text of a device function that runs a task and then, if the host has set the word of
    operand `index`, ends the launch after this iteration. call: the C++ text of the task's call. To
    end the launch it lowers the number of iterations; the iteration barrier makes the new number
    visible to all processors.
    """
    word = f"reinterpret_cast<const ark_u32*>({text.pointer(sig, index)})"
    return text.function(
        name,
        f"  const ark_u32* word = {word};\n"
        "  const ark_u32 asked = ark_ask_leave(word);\n"
        f"  {call};\n"
        "  ark_heed_leave(c, word, asked);\n",
    )


class AdvanceParams(Params, frozen=True):
    rows: Rows


class Advance(TaskKind):
    name = "advance"
    params = AdvanceParams
    headers = HEADERS

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2, 3)
        shaped(sig, 0, (len(SETTINGS),), "int32", dense=True)
        for index in range(1, len(sig.operands)):
            shaped(sig, index, (1,), "int32")

    def places(self, sig: Signature) -> Places:
        return Places((range(1),))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        read = [whole(i, operand) for i, operand in enumerate(sig.operands)]
        return [*read, whole(1, sig.operands[1], write=True)]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        operands = (text.given(sig, 0), text.given(sig, 1, const=False))
        constants = (sig.read(AdvanceParams).rows,)
        if len(sig.operands) == 2:
            return text.call(name, "ark_advance", constants, operands)
        return leaving(name, sig, 2, text.called("ark_advance", constants, operands))


register(Advance())
