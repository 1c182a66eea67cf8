"""Elementwise tiles: one function of one or two broadcast operands, or of a scalar; casts, fills.

params: function (a name of ark.tasks.functions), tile (4 sizes), scalar (None, or the second
input). operands: inputs..., output. coord: the tile's first index per dimension. With no input the
output is filled with the scalar.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.tasks import text
from ark.tasks.functions import FUNCTIONS


def broadcast_access(
    sig: Signature, index: int, lo: Sequence[int], hi: Sequence[int], write: bool = False
) -> Access:
    """The part of operand `index` that the output box lo..hi (4 dimensions) touches."""
    shape = sig.operands[index].shape
    rank = len(shape)
    tail_lo, tail_hi = tuple(lo)[4 - rank :], tuple(hi)[4 - rank :]
    return Access(
        index,
        tuple(0 if n == 1 else b for b, n in zip(tail_lo, shape, strict=True)),
        tuple(1 if n == 1 else min(e, n) for e, n in zip(tail_hi, shape, strict=True)),
        write,
    )


class Elementwise(TaskKind):
    name = "elementwise"

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        out = len(sig.operands) - 1
        shape = text.pad4(sig.operands[out].shape, 1)
        tile = sig.params["tile"]
        hi = [min(c + s, n) for c, s, n in zip(coord, tile, shape, strict=True)]
        return [broadcast_access(sig, i, coord, hi, i == out) for i in range(out + 1)]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        out = len(sig.operands) - 1
        entry = FUNCTIONS[sig.params["function"]]
        scalar = sig.params.get("scalar")
        integer = all(o.dtype in text.INTEGERS for o in sig.operands)
        compute = "ark_i32" if integer else "float"
        expr = (entry.integer if integer else entry.expr) or entry.expr
        names = ["i0", "i1", "i2", "i3"]
        declare = "".join(text.operand(sig, i, f"p{i}", const=i != out) for i in range(out + 1))
        body = ""
        for letter, i in zip("ab", range(out), strict=False):
            value = text.load(sig, i, f"p{i}", text.offset(sig, i, names))
            body += f"    const {compute} {letter} = static_cast<{compute}>({value});\n"
        if scalar is not None:
            letter = "ab"[out]
            number = str(int(scalar)) if integer else text.literal(scalar)
            body += f"    const {compute} {letter} = {number};\n"
        target = sig.operands[out]
        where = text.offset(sig, out, names)
        body += f"    {text.store(sig, out, 'po', where, expr)}\n"
        declare = declare.replace(f" p{out} =", " po =")
        loop = text.box_loop(text.pad4(target.shape, 1), sig.params["tile"], body, machine)
        return text.function(name, declare + loop)


register(Elementwise())
