"""The task kind `transpose`: a copy with the dimensions in another order. Emitted by
ark.lower.ops.movement.

params: perm (of 4 dimensions, or of all where there are more), tile of the output (of 4; more
dimensions are folded: ark.ir.fold).

operands: input, output.

coord: the tile's first index in the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from ark.ir.fold import fold
from ark.ir.values import MAX_DIMS
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import Dim, Params, Places, Tile, box, copyable, count, covers, need
from ark.tasks import elementwise, text
from ark.tasks.box_text import NAMES, tile_type
from ark.tasks.box_writer import write_box
from ark.tasks.elementwise import COPY, tile_box

TRANSPOSE_TILE_ELEMENTS = 64  # side of the square that is transposed through shared memory
MAX_SHORT_ROW_BYTES = 256  # bytes of consecutive source rows that a thread holds at once


class TransposeParams(Params, frozen=True):
    perm: Annotated[tuple[Dim, ...], msgspec.Meta(min_length=4, max_length=MAX_DIMS)]
    tile: Tile


class Transpose(TaskKind):
    name = "transpose"
    params = TransposeParams
    headers = (*elementwise.HEADERS, text.header("transpose.h"))

    def check(self, sig: Signature) -> None:
        super().check(sig)
        params = sig.read(TransposeParams)
        count(sig, 2)
        perm, (source, out) = params.perm, sig.operands
        rank = max(4, len(out.shape))
        pad = rank - len(out.shape)
        need(
            sorted(perm) == list(range(rank)) and list(perm[:pad]) == list(range(pad)),
            f"perm {list(perm)} is not a permutation of {len(out.shape)} dimensions",
        )
        before, after = text.pad4(source.shape, 1), text.pad4(out.shape, 1)
        need(
            len(source.shape) == len(out.shape)
            and all(before[p] == n for p, n in zip(perm, after, strict=True)),
            f"perm {list(perm)} of {list(source.shape)} does not give {list(out.shape)}",
        )
        copyable(source, out)
        covers(params.tile, out.shape)

    def places(self, sig: Signature) -> Places:
        return box(fold(sig.operands[1].shape), sig.read(TransposeParams).tile)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        params = sig.read(TransposeParams)
        shape, perm = sig.operands[1].shape, params.perm
        lo, hi = tile_box(shape, coord, params.tile)
        pad = len(perm) - len(shape)
        low, high = [0] * len(shape), [0] * len(shape)
        for d, p in enumerate(perm[pad:]):
            low[p - pad], high[p - pad] = lo[d], hi[d]
        return [Access(0, tuple(low), tuple(high)), Access(1, lo, hi, write=True)]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return square_bytes(sig.operands[0].itemsize) if machine.cooperative else 0

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(TransposeParams)
        perm, tile = params.perm, params.tile
        names = text.indices(sig.operands[1].shape, NAMES)
        places = [""] * len(perm)
        for d, p in enumerate(perm):
            places[p] = names[d]
        last = len(perm) - 1
        if perm.index(last) <= last - 3 and last > 3:
            return text.function(name, write_box(sig, COPY, tile, machine, places={0: places}))
        if perm[-1] == last:
            body = write_box(sig, COPY, tile, machine, places={0: places}, once=True)
            return text.function(name, body)
        # Threads transpose squares: one side of a square is along the last dimension of the result,
        # the other along the last dimension of the source.
        across = perm.index(last) - (last - 3)
        shape = fold(sig.operands[1].shape)
        vector = min(8, 16 // sig.operands[1].itemsize)
        to_row = str(text.pad4(sig.operands[1].strides, 0)[perm.index(last)])
        ends = (
            text.place(sig, 0, NAMES, places),
            text.place(sig, 1, NAMES, names, const=False),
            text.addresses(sig, (0, 1)),
        )
        box_type = tile_type(tile, shape)
        from_row = str(text.pad4(sig.operands[0].strides, 0)[perm[-1]])
        for d, rows in ((2, to_row), (3, from_row)):
            width = _short(sig, d, tile) if across == 2 and machine.lanes > 1 else 0
            if width:
                side = str(d == 3).lower()
                short = (box_type, side, shape[d], width, sig.operands[1].ctype)
                return text.call(name, "ark_transpose_short", short, (rows, *ends))
        lengths = (shape[3], shape[across], tile[3], tile[across])
        strides = [s for o in sig.operands for s in o.strides if s != 1]
        while vector > 1 and any(n % vector for n in (*lengths, *strides)):
            vector //= 2
        vectors = -(
            -TRANSPOSE_TILE_ELEMENTS
            * TRANSPOSE_TILE_ELEMENTS
            // (vector * machine.lanes * machine.warps)
        )
        many = max(1, 4 // vectors) if vector > 1 else 1
        constants = (box_type, across, TRANSPOSE_TILE_ELEMENTS, vector, many, sig.operands[1].ctype)
        return text.call(name, "ark_transpose_tile", constants, (from_row, to_row, *ends))


def square_bytes(itemsize: int) -> int:
    """Bytes of shared memory of a square of elements of `itemsize` bytes."""
    apart = TRANSPOSE_TILE_ELEMENTS * itemsize + max(4, itemsize)  # bytes between its rows
    return TRANSPOSE_TILE_ELEMENTS * apart


def _short(sig: Signature, d: int, tile: Sequence[int]) -> int:
    """The number of short rows that one thread transposes at once: rows of the source (d = 2) or of
    the result (d = 3) that together fill dimension d of the folded result. 0 if rows are long, cut
    by tiles or not contiguous.
    """
    source, out = sig.operands
    shape, size = fold(out.shape), source.itemsize
    row = shape[d]
    if row < 2 or row != tile[d] or row * size > MAX_SHORT_ROW_BYTES // 4:
        return 0
    perm, taken, stored = (
        sig.read(TransposeParams).perm,
        *(text.pad4(o.strides, 0) for o in sig.operands),
    )
    steps = (taken[perm[-1]], stored[-1]) if d == 2 else (stored[-2], taken[-1])
    if steps != (row, 1) or stored[-1] != 1:
        return 0
    along = 5 - d
    others = [s for o in sig.operands for s in o.strides if s not in (1, row)]
    width = 16 // size
    while width > 1 and (
        row * width * size > MAX_SHORT_ROW_BYTES
        or any(n % width for n in (tile[along], shape[along], *others))
    ):
        width //= 2
    return width


register(Transpose())
