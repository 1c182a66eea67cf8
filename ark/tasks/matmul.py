"""General matrix-multiply tiles: any transposes, batch and broadcast, fp32 accumulation.

params: transpose_a, transpose_b, tile (rows, columns). operands: a, b, output. coord: batch index
of the output's dimensions 0 and 1, first row, first column. This is the common body; vendors
replace it where their matrix units serve the signature.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.ir.fold import fold, unfold
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import Params, Places, Size, box, count, fits, need, typed
from ark.tasks import text


class MatmulParams(Params, frozen=True):
    transpose_a: bool
    transpose_b: bool
    tile: tuple[Size, Size]


class Matmul(TaskKind):
    name = "matmul"
    params = MatmulParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 3)
        a, b, out = (typed(sig, index).shape for index in range(3))
        need(min(len(a), len(b), len(out)) >= 2, "an operand has fewer than 2 dimensions")
        m, n, k = dims(sig)
        left = a[-2:][::-1] if sig.params["transpose_a"] else a[-2:]
        right = b[-2:][::-1] if sig.params["transpose_b"] else b[-2:]
        need(
            left == (m, k) and right == (k, n),
            f"a product of {list(left)} and {list(right)} is not {[m, n]}",
        )
        for shape in (a, b):
            need(
                len(shape) <= len(out)
                and all(x in (1, y) for x, y in zip(shape[-3::-1], out[-3::-1], strict=False)),
                f"the batch of {list(shape)} does not broadcast to {list(out)}",
            )
        fits(sig.params["tile"], (m, n))

    def places(self, sig: Signature) -> Places:
        return box(fold(sig.operands[2].shape), (1, 1, *sig.params["tile"]))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        m, n, k = dims(sig)
        rows, columns = sig.params["tile"]
        m1, n1 = min(coord[2] + rows, m), min(coord[3] + columns, n)
        a_box = ((coord[2], 0), (m1, k))
        b_box = ((0, coord[3]), (k, n1))
        if sig.params["transpose_a"]:
            a_box = ((0, coord[2]), (k, m1))
        if sig.params["transpose_b"]:
            b_box = ((coord[3], 0), (n1, k))
        found = [
            Access(i, *self._batched(sig, i, coord, box), write=False)
            for i, box in ((0, a_box), (1, b_box))
        ]
        out_box = ((coord[2], coord[3]), (m1, n1))
        found.append(Access(2, *self._batched(sig, 2, coord, out_box), write=True))
        return found

    def _batched(
        self,
        sig: Signature,
        index: int,
        coord: Sequence[int],
        box: tuple[tuple[int, int], tuple[int, int]],
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape, out = sig.operands[index].shape, sig.operands[2].shape
        place, _ = unfold(out, (*coord[:2], 0, 0), (coord[0] + 1, coord[1] + 1, 1, 1))
        batch = place[len(out) - len(shape) : -2]
        lo = tuple(0 if n == 1 else b for b, n in zip(batch, shape, strict=False))
        return (*lo, *box[0]), (*(b + 1 for b in lo), *box[1])

    def scratch(self, sig: Signature, machine: Machine) -> int:
        rows, columns = sig.params["tile"]
        return 4 * rows * columns if machine.has("single_thread") else 0

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        _, _, k = dims(sig)
        rows, columns = sig.params["tile"]
        return 2.0 * rows * columns * k, super().cost(sig, coord)[1]

    def headers(self) -> tuple[str, ...]:
        return (text.header("matmul.h"),)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        alone = machine.has("single_thread") and not sig.params["transpose_b"]
        places = (
            _place(sig, 0, "m", "k", bool(sig.params["transpose_a"])),
            _place(sig, 1, "k", "n", bool(sig.params["transpose_b"])),
            _place(sig, 2, "m", "n", False),
        )
        callee = "ark_matmul_alone" if alone else "ark_matmul"
        return text.call(name, callee, (*sig.params["tile"], *dims(sig)), places)


def dims(sig: Signature) -> tuple[int, int, int]:
    """(m, n, k) of the product."""
    a, out = sig.operands[0].shape, sig.operands[2].shape
    k = a[-2] if sig.params["transpose_a"] else a[-1]
    return out[-2], out[-1], k


def _place(sig: Signature, index: int, row: str, column: str, transposed: bool) -> str:
    names = (column, row) if transposed else (row, column)
    variables = ["t.coord[0]", "t.coord[1]", *names]
    variables = text.indices(sig.operands[2].shape, variables)
    return text.place(sig, index, (row, column), variables, const=index != 2)


register(Matmul())
