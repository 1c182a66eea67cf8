"""The task kind `scan`: running sums and products along one axis. All elements along the axis (a
line) belong to one thread; a warp or the block shares a long line. Emitted by ark.lower.ops.scans.

params: axis (of the operands' own dimensions), function, exclusive, reverse, tile.

operands: input, output, of one shape.

coord: the tile's first index in the shape with size 1 along the axis (four dimensions; more are
folded).
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
    Tile,
    box,
    count,
    covers,
    need,
    shaped,
    typed,
)
from ark.tasks import expression, text
from ark.tasks.along import ALONG, indices, join, lines
from ark.tasks.box_text import NAMES, each_index, tile_type
from ark.tasks.elementwise import tile_box

SCAN_ELEMENTS_IN_FLIGHT = 8  # elements of a line that a thread has in flight


class ScanParams(Params, frozen=True):
    axis: Dim
    function: Literal["add", "mul"]
    exclusive: bool
    reverse: bool
    tile: Tile


class Scan(TaskKind):
    name = "scan"
    params = ScanParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        params = sig.read(ScanParams)
        count(sig, 2)
        source = typed(sig, 0, *FLOAT_NAMES, *INTEGER_NAMES)
        axis = params.axis
        need(axis < len(source.shape), f"{list(source.shape)} has no axis {axis}")
        shaped(sig, 1, source.shape, source.dtype)
        covers(params.tile, lines(source.shape, axis))

    def places(self, sig: Signature) -> Places:
        params = sig.read(ScanParams)
        return box(fold(lines(sig.operands[1].shape, params.axis)), params.tile)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        params = sig.read(ScanParams)
        shape, axis = sig.operands[1].shape, params.axis
        lo, hi = tile_box(lines(shape, axis), coord, params.tile)
        hi = (*hi[:axis], shape[axis], *hi[axis + 1 :])
        return [Access(0, lo, hi), Access(1, lo, hi, write=True)]

    def headers(self) -> tuple[str, ...]:
        return ALONG

    def scratch(self, sig: Signature, machine: Machine) -> int:
        pieces = _pieces(sig, machine)
        if not pieces or pieces[1] == 1:
            return 0
        size = 8 if expression.value_type(sig.operands[0].dtype) == "ark_i64" else 4
        return 2 * size * machine.lanes * machine.warps

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(ScanParams)
        shape, axis = sig.operands[1].shape, params.axis
        names = indices(lines(shape, axis))
        names[axis] = "k"
        at = [text.offset(sig, i, names) for i in range(2)]
        compute = expression.value_type(sig.operands[0].dtype)
        flags = [str(flag).lower() for flag in (params.reverse, params.exclusive)]
        start = f"{compute}({1 if params.function == 'mul' else 0})"
        given = (
            f"        [&](int k) -> {compute} {{ return {text.load(sig, 0, 'p0', at[0])}; }},\n"
            f"        {join(params.function, sig.operands[0])},\n"
            f"        [&](int k, {compute} total) {{ {text.store(sig, 1, 'p1', at[1], 'total')} }}"
        )
        declare = text.operand(sig, 0, "p0") + text.operand(sig, 1, "p1", const=False)
        tile, frame = params.tile, fold(lines(shape, axis))
        pieces = _pieces(sig, machine)
        if not pieces:
            constants = ", ".join((str(shape[axis]), *flags, compute))
            body = f"    ark_scan_line<{constants}>({start},\n{given});\n"
            return text.function(name, declare + each_index(tile, frame, body))
        along, team = pieces
        listed = (shape[axis], *flags, str(along).lower(), team, SCAN_ELEMENTS_IN_FLIGHT, compute)
        body = (
            f"    ark_scan_pieces<{', '.join(map(str, listed))}>({start}, inside,\n{given},\n"
            "        ARK_SCRATCH(c), parity);\n"
        )
        unused = " ".join(f"(void){n};" for n in NAMES)
        walk = (
            f"  int parity = 0;\n  ark_each_line<{tile_type(tile, frame)}, "
            f"{1 if along else machine.lanes}, {team}>(t.coord,\n"
            f"      [&](bool inside, {', '.join(f'int {n}' for n in NAMES)}) {{\n    {unused}\n"
            f"{body}  }});\n"
        )
        return text.function(name, declare + walk)


def _pieces(sig: Signature, machine: Machine) -> tuple[bool, int] | None:
    """How the threads of a block divide lines (all elements along the axis) among themselves: True
    if the lanes of a warp are along a line, and the number of warps per line. None if each line
    belongs to one thread.
    """
    params = sig.read(ScanParams)
    shape, axis, tile = sig.operands[1].shape, params.axis, params.tile
    shared = any(o.per_item > 1 for o in sig.operands)
    if not machine.cooperative or shared or shape[axis] < machine.lanes:
        return None
    if axis != len(shape) - 1 and 2 * tile[3] >= machine.lanes:
        return (
            (False, machine.warps)
            if shape[axis] >= SCAN_ELEMENTS_IN_FLIGHT * machine.warps
            else None
        )
    return True, 1 if math.prod(tile) >= machine.warps else machine.warps


register(Scan())
