"""The task kind `scan`: running sums and products, and linear recurrences, along one axis. All
elements along the axis (a line) belong to one thread; a warp or the block shares a long line.
Emitted by ark.lower.ops.scans.

params: axis (of the operands' own dimensions), function, exclusive, reverse, tile.

operands: input, [start], output. Input and output have one shape. `start` has size 1 along the axis
and the type in which totals are computed; its element is joined before the elements of its line.
With the function `linear` the operands are factors, terms and output, of one shape: output[i] =
factors[i] * output[i - 1] + terms[i]. The total of a part of a line is then a function: the one
that the part applies to the value before it (ArkLinear).

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
from ark.tasks.reduce import team_of

SCAN_ELEMENTS_IN_FLIGHT = 8  # elements of a line that a thread has in flight
SCAN_VECTORS_IN_FLIGHT = 4  # the same for vectors of several elements
MAX_SCAN_VECTOR_ELEMENTS = 4  # elements
_LINEAR = "[](const ArkLinear& now, const ArkLinear& more) { return ark_join_linear(now, more); }"


class ScanParams(Params, frozen=True):
    axis: Dim
    function: Literal["add", "mul", "linear"]
    exclusive: bool
    reverse: bool
    tile: Tile


class Scan(TaskKind):
    name = "scan"
    params = ScanParams
    headers = ALONG

    def check(self, sig: Signature) -> None:
        super().check(sig)
        params = sig.read(ScanParams)
        count(sig, 2, 3)
        source = typed(sig, 0, *FLOAT_NAMES, *INTEGER_NAMES)
        axis = params.axis
        need(axis < len(source.shape), f"{list(source.shape)} has no axis {axis}")
        shaped(sig, len(sig.operands) - 1, source.shape, source.dtype)
        if params.function == "linear":
            count(sig, 3)
            typed(sig, 0, *FLOAT_NAMES)
            shaped(sig, 1, source.shape, source.dtype)
        elif len(sig.operands) > 2:
            wide = "fp32" if source.dtype in FLOAT_NAMES else source.dtype
            shaped(sig, 1, lines(source.shape, axis), wide)
        covers(params.tile, lines(source.shape, axis))

    def places(self, sig: Signature) -> Places:
        params = sig.read(ScanParams)
        return box(fold(lines(sig.operands[-1].shape, params.axis)), params.tile)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        params = sig.read(ScanParams)
        shape, axis, out = sig.operands[-1].shape, params.axis, len(sig.operands) - 1
        lo, hi = tile_box(lines(shape, axis), coord, params.tile)
        end = (*hi[:axis], shape[axis], *hi[axis + 1 :])
        second = end if params.function == "linear" else hi
        more = [Access(1, lo, second)] if out > 1 else []
        return [Access(0, lo, end), *more, Access(out, lo, end, write=True)]

    def texts(self, sig: Signature) -> tuple[str, ...]:
        linear = sig.read(ScanParams).function == "linear"
        return (text.header("recurrence.h"),) if linear else ()

    def scratch(self, sig: Signature, machine: Machine) -> int:
        pieces = _pieces(sig, machine)
        if not pieces or pieces[1] == 1:
            return 0
        size = 8 if _total_type(sig) in ("ark_i64", "ArkLinear") else 4
        return 2 * size * machine.lanes * machine.warps

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(ScanParams)
        out = len(sig.operands) - 1
        shape, axis = sig.operands[out].shape, params.axis
        names = indices(lines(shape, axis))
        names[axis] = "k"
        linear = params.function == "linear"
        at = {i: text.offset(sig, i, names) for i in ((0, 1, out) if linear else (0, out))}
        compute = _total_type(sig)
        flags = [str(flag).lower() for flag in (params.reverse, params.exclusive)]
        start = f"{compute}({1 if params.function == 'mul' else 0})"
        start = "ArkLinear{1.0f, 0.0f}" if linear else start
        first, declare = start, text.operand(sig, 0, "p0")
        if linear:
            declare += text.operand(sig, 1, "p1")
        elif out > 1:
            names[axis] = "0"
            declare += text.operand(sig, 1, "p1")
            first = text.load(sig, 1, "p1", text.offset(sig, 1, names))
        declare += text.operand(sig, out, "to", const=False)
        join_text = _LINEAR if linear else join(params.function, sig.operands[0])
        tile, frame = params.tile, fold(lines(shape, axis))
        pieces = _pieces(sig, machine)
        load = text.load(sig, 0, "p0", at[0])
        load = f"ArkLinear{{{load}, {text.load(sig, 1, 'p1', at[1])}}}" if linear else load
        part = ".term" if linear else ""  # of a total: the value that is stored
        if not pieces:
            constants = ", ".join((str(shape[axis]), *flags, compute))
            store = text.store(sig, out, "to", at[out], f"total{part}")
            body = (
                f"    ark_scan_line<{constants}>({first},\n"
                f"        [&](int k) -> {compute} {{ return {load}; }},\n        {join_text},\n"
                f"        [&](int k, {compute} total) {{ {store} }});\n"
            )
            return text.function(name, declare + each_index(tile, frame, body))
        along, team = pieces
        vector = _vector(sig) if along else 1
        each = SCAN_ELEMENTS_IN_FLIGHT if vector == 1 else SCAN_VECTORS_IN_FLIGHT
        values = f"{compute} (&x)[{vector}]"
        if vector == 1:
            loads, stores = f"x[0] = {load};", text.store(sig, out, "to", at[out], f"x[0]{part}")
        else:
            loads, element = "", "ark_plain(pack.v[v])"
            if linear:
                loads = f"const auto terms = ark_load_pack<{vector}>(p1 + ({at[1]}));\n          "
                element = f"ArkLinear{{{element}, ark_plain(terms.v[v])}}"
            loads += f"const auto pack = ark_load_pack<{vector}>(p0 + ({at[0]}));\n          "
            loads += f"for (int v = 0; v < {vector}; ++v) x[v] = {element};"
            stores = (
                f"ArkPack<{sig.operands[out].ctype}, {vector}> pack;\n"
                f"          for (int v = 0; v < {vector}; ++v) "
                f"{text.store(sig, out, 'pack.v', 'v', f'x[v]{part}')}\n"
                f"          ark_store_pack<{vector}>(to + ({at[out]}), pack);"
            )
        listed = (shape[axis], *flags, str(along).lower(), team, each, vector, compute)
        body = (
            f"    ark_scan_pieces<{', '.join(map(str, listed))}>({start}, "
            f"inside ? {compute}({first}) : {start}, inside,\n"
            f"        [&](int k, {values}) {{\n          {loads} }},\n        {join_text},\n"
            f"        [&](int k, {values}) {{\n          {stores} }},\n"
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


def _total_type(sig: Signature) -> str:
    """The C++ type of the total of some elements of a line."""
    linear = sig.read(ScanParams).function == "linear"
    return "ArkLinear" if linear else expression.value_type(sig.operands[0].dtype)


def _vector(sig: Signature) -> int:
    """The number of neighbouring elements of a line that one access loads or stores."""
    params, source = sig.read(ScanParams), sig.operands[0]
    axis = params.axis
    whole = sig.operands if params.function == "linear" else (source, sig.operands[-1])
    vector = MAX_SCAN_VECTOR_ELEMENTS if all(o.aligned for o in whole) else 1
    vector = min(vector, 16 // source.itemsize)
    strides = [s for o in whole for s in (*o.strides[:axis], *o.strides[axis + 1 :])]
    while vector > 1 and any(n % vector for n in (source.shape[axis], *strides)):
        vector //= 2
    return vector if all(o.strides[axis] == 1 for o in whole) else 1


def _pieces(sig: Signature, machine: Machine) -> tuple[bool, int] | None:
    """How the threads of a block share lines (all elements along the axis), as a pair: True if
    neighbouring lanes have neighbouring elements of one line (False: a line each), and the number
    of warps per line. None if each line is computed by one thread.
    """
    params = sig.read(ScanParams)
    shape, axis, tile = sig.operands[-1].shape, params.axis, params.tile
    shared = any(o.per_item > 1 for o in sig.operands)
    if not machine.cooperative or shared or shape[axis] < machine.lanes:
        return None
    if axis != len(shape) - 1 and 2 * tile[3] >= machine.lanes:
        return (
            (False, machine.warps)
            if shape[axis] >= SCAN_ELEMENTS_IN_FLIGHT * machine.warps
            else None
        )
    return True, team_of(math.prod(tile), machine)


register(Scan())
