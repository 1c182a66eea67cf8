"""Reductions over one dimension: sum, mean, max, min, prod.

params: function, axis (of 4, or of all where there are more), count (what a mean divides by), tile
(4 sizes of the output, 1 along the axis; more dimensions are folded, ark.ir.fold). operands: input,
output. coord: the tile's first index. reduce.h has the device side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ark.ir.fold import fold
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import (
    FLOAT_NAMES,
    INTEGER_NAMES,
    Dim,
    Params,
    Places,
    Size,
    Tile,
    box,
    count,
    covers,
    need,
    shaped,
    typed,
)
from ark.tasks import expression, text
from ark.tasks.pointwise import HEADERS, NAMES, tile_box, tile_type

SIDE_BY_SIDE = 64  # sums of one thread that runs alone, for vectors
_UNUSED = "(void)i0; (void)i1; (void)i2; "
_FOLDS = {
    "sum": "ArkAddFold",
    "mean": "ArkAddFold",
    "max": "ArkMaxFold",
    "min": "ArkMinFold",
    "prod": "ArkMulFold",
}
COLUMNS = 64  # neighbouring results that a block reduces at once, where not the last dimension is
LOADS_OF_BARRIERS = 16  # loads that a thread makes one after another while a block meets twice
DEEP_PACKS = 4  # packs that a thread adds up in a reduction while as many are under way


def _compute(sig: Signature) -> str:
    """The type that elements are joined in."""
    return expression.value_type(sig.operands[0].dtype)


class ReduceParams(Params, frozen=True):
    function: Literal["sum", "mean", "max", "min", "prod"]
    axis: Dim
    count: Size
    tile: Tile


class Reduce(TaskKind):
    name = "reduce"
    params = ReduceParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2)
        mean = sig.params["function"] == "mean"
        source = typed(sig, 0, *FLOAT_NAMES, *(() if mean else INTEGER_NAMES))
        axis = sig.params["axis"] - max(4, len(source.shape)) + len(source.shape)
        need(
            0 <= axis < len(source.shape),
            f"the axis {sig.params['axis']} is none of {list(source.shape)}",
        )
        shape = (*source.shape[:axis], 1, *source.shape[axis + 1 :])
        shaped(sig, 1, shape, *(INTEGER_NAMES if source.dtype in INTEGER_NAMES else FLOAT_NAMES))
        covers(sig.params["tile"], shape)

    def places(self, sig: Signature) -> Places:
        return box(fold(sig.operands[1].shape), sig.params["tile"])

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        source, out = (o.shape for o in sig.operands)
        lo, hi = tile_box(out, coord, sig.params["tile"])
        axis = sig.params["axis"] - max(4, len(source)) + len(source)
        return [
            Access(
                0, (*lo[:axis], 0, *lo[axis + 1 :]), (*hi[:axis], source[axis], *hi[axis + 1 :])
            ),
            Access(1, lo, hi, write=True),
        ]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        threads = machine.lanes * machine.warps
        size = 8 if _compute(sig) == "ark_i64" else 4
        if self._last(sig):
            return 2 * size * machine.warps
        if machine.has("single_thread"):
            return size * int(sig.params["tile"][3])
        pack, across = self._across(sig, machine)
        return size * threads // across * across * pack

    def _last(self, sig: Signature) -> bool:
        """Is it the last dimension that is reduced?"""
        return bool(sig.params["axis"] == max(4, len(sig.operands[0].shape)) - 1)

    def _pack(self, sig: Signature) -> int:
        source = sig.operands[0]
        pack = min(8, 16 // source.itemsize)
        while pack > 1 and any(s % pack for s in source.strides[:-1]):
            pack //= 2
        return pack

    def _across(self, sig: Signature, machine: Machine) -> tuple[int, int]:
        """(elements of a pack, packs side by side) for the columns of a tile."""
        pack = self._pack(sig)
        last, tile = sig.operands[1].shape[-1], int(sig.params["tile"][3])
        while pack > 1 and (last % pack or tile % pack):
            pack //= 2
        threads = machine.lanes * machine.warps
        count = text.pad4(sig.operands[0].shape, 1)[sig.params["axis"]]
        # Where there is little to add up, threads stand side by side instead.
        wide = min(tile, max(COLUMNS, threads * pack * DEEP_PACKS // count))
        across = 1
        while across * pack < wide and 2 * across <= threads:
            across *= 2
        return pack, across

    def headers(self) -> tuple[str, ...]:
        return (*HEADERS, text.header("folds.h"), text.header("reduce.h"))

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        return (
            self._rows(name, sig, machine) if self._last(sig) else self._columns(name, sig, machine)
        )

    def _forms(self, sig: Signature) -> tuple[str, str, str]:
        """How two elements are joined, as what, and of which tile of the result."""
        tile = tile_type(sig.params["tile"], fold(sig.operands[1].shape))
        return _FOLDS[sig.params["function"]], _compute(sig), tile

    def _value(self, sig: Signature) -> str:
        """What is stored of a total v."""
        mean = sig.params["function"] == "mean"
        return f"v / {text.literal(sig.params['count'])}" if mean else "v"

    def _rows(self, name: str, sig: Signature, machine: Machine) -> str:
        names = text.indices(sig.operands[1].shape, [*NAMES[:3], "0"])
        pack, narrow, deep = self._pack(sig), 1, DEEP_PACKS
        if machine.has("single_thread"):
            pack, narrow, deep = SIDE_BY_SIDE, SIDE_BY_SIDE, 1
        many = math.prod(sig.params["tile"][:3]) >= machine.warps
        columns = fold(sig.operands[0].shape)[3]
        constants = (*self._forms(sig), columns, pack, narrow, deep, many)
        store = text.store(
            sig, 1, text.pointer(sig, 1, const=False), text.offset(sig, 1, names), self._value(sig)
        )
        arguments = (
            text.place(sig, 0, NAMES[:3], names),
            f"[&](int i0, int i1, int i2, {_compute(sig)} v) {{ {_UNUSED}{store} }}",
            text.addresses(sig, (0,)),
        )
        return text.call(name, "ark_reduce_last", constants, arguments)

    def _columns(self, name: str, sig: Signature, machine: Machine) -> str:
        axis = sig.params["axis"]
        names = text.indices(sig.operands[1].shape, NAMES)
        inner = list(names)
        inner[axis] = "0"
        pack, across = self._across(sig, machine)
        scalar = min(machine.lanes * machine.warps, across * pack)
        if scalar != across * pack:
            pack, across = 1, scalar
        count = text.pad4(sig.operands[0].shape, 1)[axis]
        stride = text.pad4(sig.operands[0].strides, 0)[axis]
        tile = sig.params["tile"]
        outer, packs = math.prod(tile[:3]), math.prod(tile) // pack
        rounds = -(-packs // (machine.lanes * machine.warps))
        # Else the block reduces one outer index after the other, with two barriers for each.
        alone = not machine.has("single_thread") and outer * LOADS_OF_BARRIERS > rounds * count
        constants = (*self._forms(sig), count, stride, pack, DEEP_PACKS, across, scalar, alone)
        arguments = (
            text.place(sig, 0, NAMES, inner),
            text.place(sig, 1, NAMES, names, const=False),
            f"[&]({sig.operands[1].ctype}* to, int k, {_compute(sig)} v) "
            f"{{ {text.store(sig, 1, 'to', 'k', self._value(sig))} }}",
            text.addresses(sig, (0,)),
        )
        return text.call(name, "ark_reduce_across", constants, arguments)


register(Reduce())
