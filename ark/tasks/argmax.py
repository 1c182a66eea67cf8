"""The task kind `argmax`, which finds the index of the largest element of each row. Emitted by
ark.lower.ops.norms.

params: rows (the number of rows of a task, along dimension 2 of four).

operands: input (..., n), output (..., 1).

coord: the indices of the task's first row in dimensions 0 to 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.ir.fold import fold
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import INDEX_NAMES, Params, Places, Rows, count, fits, shaped, typed
from ark.tasks import text
from ark.tasks.row_norm import row_box, row_places, vector_elements

HEADERS = (text.header("sampling.h"), text.header("argmax.h"))


class ArgMaxParams(Params, frozen=True):
    rows: Rows


class ArgMax(TaskKind):
    name = "argmax"
    params = ArgMaxParams
    headers = HEADERS

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2)
        shape = typed(sig, 0).shape
        shaped(sig, 1, (*shape[:-1], 1), *INDEX_NAMES)
        fits((sig.read(ArgMaxParams).rows,), fold(shape)[2:3])

    def places(self, sig: Signature) -> Places:
        return row_places(sig.operands[0].shape, sig.read(ArgMaxParams).rows)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        shape, rows = sig.operands[0].shape, sig.read(ArgMaxParams).rows
        return [
            Access(0, *row_box(shape, coord, rows)),
            Access(1, *row_box(shape, coord, rows, columns=1), write=True),
        ]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return 8 * machine.warps

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        shape = sig.operands[0].shape
        variables = text.indices(shape, ["t.coord[0]", "t.coord[1]", "row", "column"])
        places = (
            text.place(sig, 0, ("row", "column"), variables),
            text.place(sig, 1, ("row",), [*variables[:-1], "0"], const=False),
        )
        rows, source = sig.read(ArgMaxParams).rows, sig.operands[0]
        vector = vector_elements(sig.operands[:1], shape[-1]) if source.strides[-1] == 1 else 1
        each = rows >= machine.warps
        constants = (rows, *fold(shape)[2:], sig.operands[1].ctype, vector, each)
        return text.call(name, "ark_argmax", constants, (*places, text.addresses(sig, (0,))))


register(ArgMax())
