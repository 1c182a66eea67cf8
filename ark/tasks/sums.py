"""Sums over ranks: what every rank put into this rank's receive buffers, added in rank order, and
perhaps a residual behind them.

params: tile (elements per task), order (the inputs that are added first, in this order; the others
follow in theirs).
operands: inputs..., output, all of one dense shape viewed as one dimension. coord: first element.
Adding in rank order makes the result the same bits on every rank; integers wrap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import FLOAT_NAMES, INTEGER_NAMES, Params, Places, Size, fits, need, shaped
from ark.tasks import expression, text
from ark.tasks.pointwise import write_box

Place = Annotated[int, msgspec.Meta(ge=0, le=1 << 12)]


class SumRanksParams(Params, frozen=True):
    tile: Size
    order: tuple[Place, ...] = ()


class SumRanks(TaskKind):
    name = "sum_ranks"
    params = SumRanksParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        need(len(sig.operands) >= 2, "it has no inputs")
        out = sig.operands[-1]
        need(len(out.shape) == 1, f"the output has shape {list(out.shape)}, expected one dimension")
        integer = out.dtype in INTEGER_NAMES
        for index in range(len(sig.operands)):
            shaped(sig, index, out.shape, *((out.dtype,) if integer else FLOAT_NAMES))
        fits((sig.params["tile"],), out.shape)
        order = sig.params.get("order", ())
        need(
            sorted(order) == list(range(len(order))) and len(order) < len(sig.operands),
            f"the order {list(order)} does not name its first inputs, each once",
        )

    def on_rank(self, params: Mapping[str, Any], by: int) -> Mapping[str, Any]:
        order = params.get("order", ())
        return {**params, "order": [(place - by) % len(order) for place in order]}

    def places(self, sig: Signature) -> Places:
        return Places((range(0, sig.operands[-1].shape[0], sig.params["tile"]),))

    def in_place(self, sig: Signature) -> frozenset[int]:
        return frozenset(range(len(sig.operands) - 1))

    def packets(self, sig: Signature) -> frozenset[int]:
        return frozenset(range(len(sig.operands)))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        out = len(sig.operands) - 1
        n = sig.operands[out].shape[0]
        hi = min(coord[0] + sig.params["tile"], n)
        return [Access(i, (coord[0],), (hi,), write=i == out) for i in range(out + 1)]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        out = len(sig.operands) - 1
        n = sig.operands[out].shape[0]
        if not any(o.packet for o in sig.operands):
            first, *others = _order(sig)
            total = expression.leaf(first)
            for i in others:
                total = ["add", total, expression.leaf(i)]
            tile = [1, 1, 1, sig.params["tile"]]
            return text.function(
                name, write_box(sig, total, tile, machine, ["0", "0", "0", "t.coord[0]"])
            )
        operands = [text.given(sig, i, const=i != out) for i in (out, *_order(sig))]
        return text.call(name, "ark_sum_ranks", (n, sig.params["tile"]), operands)

    def headers(self) -> tuple[str, ...]:
        return (text.header("sums.h"),)


def _order(sig: Signature) -> list[int]:
    """The inputs as they are added."""
    order = sig.params.get("order", ())
    return [*order, *range(len(order), len(sig.operands) - 1)]


register(SumRanks())
