"""The task kind `rope`: products of complex numbers, which are stored as pairs of neighbours in the
last dimension. Emitted by ark.lower.ops.movement.

params: tile (even in the last dimension).

operands: input, other (broadcast), output.

coord: the tile's first index.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.ir.fold import fold
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import Params, Places, Tile, box, count, covers, need, typed
from ark.tasks import text
from ark.tasks.box_text import NAMES
from ark.tasks.elementwise import broadcast_access, broadcasts, tile_box


class RopeParams(Params, frozen=True):
    tile: Tile


class Rope(TaskKind):
    name = "rope"
    params = RopeParams
    headers = text.headers("rope.h")

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 3)
        for index in range(3):
            typed(sig, index)
            broadcasts(sig, index, 2)
        widths = {o.shape[-1] for o in sig.operands}
        tile = sig.read(RopeParams).tile
        need(
            len(widths) == 1 and max(widths) % 2 == 0 == tile[3] % 2,
            f"rotated pairs need one even width, but operands have {sorted(widths)}, the tile "
            f"{tile[3]}",
        )
        covers(tile, sig.operands[2].shape)

    def places(self, sig: Signature) -> Places:
        return box(fold(sig.operands[2].shape), sig.read(RopeParams).tile)

    def in_place(self, sig: Signature) -> frozenset[int]:
        return frozenset({0, 1})

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        lo, hi = tile_box(sig.operands[2].shape, coord, sig.read(RopeParams).tile)
        return [broadcast_access(sig, i, lo, hi, i == 2) for i in range(3)]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        out = sig.operands[2].shape
        parameters = (*NAMES[:3], "j")
        variables = text.indices(out, parameters)
        places = [text.place(sig, i, parameters, variables, const=i != 2) for i in range(3)]
        steps = (o.strides[-1] for o in sig.operands)
        constants = (*sig.read(RopeParams).tile, *fold(out), *steps)
        return text.call(name, "ark_rope_multiply", constants, places)


register(Rope())
