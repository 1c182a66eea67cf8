"""Boxes of a matrix, to a peer by the processor's own copies: a task may end before they have
arrived, as a product's with the param `late` (ark.tasks.matmul); the task `landed` of the same
tile, which follows on the same processor, waits for them.

operands: source, target, matrices of one shape and type. params: tile (rows, columns), late: true.
coord: 0, 0, first row, first column. Emitted by ark.ops.overlapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import Params, Places, Size, box, count, need
from ark.tasks import text


class PushParams(Params, frozen=True):
    tile: tuple[Size, Size]
    late: Literal[True]


class Push(TaskKind):
    name = "push"
    params = PushParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2)
        source, target = sig.operands
        need(len(source.shape) == 2, f"the source has shape {list(source.shape)}, no matrix")
        need(
            (source.dtype, source.shape) == (target.dtype, target.shape) and not target.packet,
            f"the source is {source.dtype}{list(source.shape)}, the target "
            f"{target.dtype}{list(target.shape)}",
        )

    def places(self, sig: Signature) -> Places:
        return box((1, 1, *sig.operands[0].shape), (1, 1, *sig.params["tile"]))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        lo = tuple(coord[2:])
        ends = zip(lo, sig.params["tile"], sig.operands[0].shape, strict=True)
        hi = tuple(min(begin + size, most) for begin, size, most in ends)
        return [Access(0, lo, hi), Access(1, lo, hi, write=True)]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        (rows, columns), (m, n) = sig.params["tile"], sig.operands[0].shape
        at = [text.offset(sig, index, ["row", "column"]) for index in (0, 1)]
        return text.function(
            name,
            f"{text.operand(sig, 0, 'from')}{text.operand(sig, 1, 'to', const=False)}"
            f"  for (int i = ark_tid(); i < {rows * columns}; i += ARK_THREADS) {{\n"
            f"    const int row = t.coord[2] + i / {columns};\n"
            f"    const int column = t.coord[3] + i % {columns};\n"
            f"    if (row < {m} && column < {n}) to[{at[1]}] = from[{at[0]}];\n  }}\n",
        )


register(Push())
