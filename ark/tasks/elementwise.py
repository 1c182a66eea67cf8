"""Elementwise tiles: one function of one or two broadcast operands, or of a scalar; casts, fills.

params: function (a name of ark.tasks.functions), tile (4 sizes), scalar (None, or the second
input). operands: inputs..., output. coord: the tile's first index per dimension. With no input the
output is filled with the scalar.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.errors import PlanError
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import Params, Places, Tile, box, fits, need
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


def broadcasts(sig: Signature, index: int, out: int) -> None:
    """Operand `index` has no more dimensions than the output, each as large or of one index."""
    shape, target = sig.operands[index].shape, sig.operands[out].shape
    need(
        len(shape) <= len(target)
        and all(n in (1, m) for n, m in zip(reversed(shape), reversed(target), strict=False)),
        f"operand {index} of shape {list(shape)} does not broadcast to {list(target)}",
    )


class ElementwiseParams(Params, frozen=True):
    function: str
    tile: Tile
    scalar: float | None = None


class Elementwise(TaskKind):
    name = "elementwise"
    params = ElementwiseParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        entry = FUNCTIONS.get(sig.params["function"])
        if entry is None:
            raise PlanError(f"it has no function {sig.params['function']!r}")
        scalar, out = sig.params.get("scalar"), len(sig.operands) - 1
        need(
            out + (scalar is not None) == entry.arity,
            f"{entry.name} takes {entry.arity} inputs, found {out}"
            + (" and a number" if scalar is not None else ""),
        )
        for index in range(out):
            broadcasts(sig, index, out)
        fits(sig.params["tile"], text.pad4(sig.operands[out].shape, 1))
        types = {o.dtype for o in sig.operands}
        if types & set(text.INTEGERS):
            need(
                entry.name == "copy" or (types == {"int32"} and entry.integer is not None),
                f"{entry.name} of {' and '.join(sorted(types))} is not built",
            )
            need(
                scalar is None
                or not types <= set(text.INTEGERS)
                or (abs(scalar) <= 1 << 32 and float(scalar).is_integer()),
                f"{scalar} is no number of type {' and '.join(sorted(types))}",
            )

    def places(self, sig: Signature) -> Places:
        return box(text.pad4(sig.operands[-1].shape, 1), sig.params["tile"])

    def in_place(self, sig: Signature) -> frozenset[int]:
        return frozenset(range(len(sig.operands) - 1))

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
