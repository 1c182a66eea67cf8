"""The task kind `unpool`, the gradient of max pooling: each pixel of an image gets the sum of the
values of the windows whose largest element it is. Emitted by ark.lower.ops.pools.

params: size, stride, dilation, before (of the windows, as in ark.tasks.pool), tile.

operands: values (n, channels, windows...), places (of the shape of the values: the number of the
largest element in each window, as from a pool with the function argmax), output (n, channels,
spatial...).

coord: the tile's first index of the output (four dimensions; more are folded).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ark.ir.fold import fold
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import INT_MAX, Params, Places, Tile, box, count, covers, need, typed
from ark.tasks import text
from ark.tasks.along import ALONG, indices
from ark.tasks.box_text import NAMES, each_index, in_order, tile_type
from ark.tasks.elementwise import tile_box
from ark.tasks.windows import Margins, Steps, vector, window_sizes

BLOCK_DIMENSIONS = 2  # spatial dimensions of blocks (see _in_blocks)
BLOCKS_IN_FLIGHT = 2  # blocks of which a thread loads the windows at once


class UnpoolParams(Params, frozen=True):
    size: Steps
    stride: Steps
    dilation: Steps
    before: Margins
    tile: Tile


class Unpool(TaskKind):
    name = "unpool"
    params = UnpoolParams
    headers = (*ALONG, text.header("pool.h"))

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 3)
        p = sig.read(UnpoolParams)
        values, places, out = (typed(sig, i, *text.FLOATS).shape for i in range(3))
        spatial = len(out) - 2
        need(
            spatial > 0 and all(len(numbers) == spatial for numbers in window_sizes(p)),
            f"the window parameters need one number for each spatial dimension of {list(out)}",
        )
        need(
            values == places and len(values) == len(out) and values[:2] == out[:2],
            f"values {list(values)} and places {list(places)} do not fit the output {list(out)}",
        )
        for d in range(spatial):
            last = (values[2 + d] - 1) * p.stride[d] + (p.size[d] - 1) * p.dilation[d]
            need(last < INT_MAX, "window indices exceed 32 bits")
        covers(p.tile, out)

    def places(self, sig: Signature) -> Places:
        return box(fold(sig.operands[2].shape), sig.read(UnpoolParams).tile)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        values, _, out = (o.shape for o in sig.operands)
        p = sig.read(UnpoolParams)
        lo, hi = tile_box(out, coord, p.tile)
        low, high = [*lo[:2]], [*hi[:2]]
        for d, n in enumerate(values[2:]):
            reach = (p.size[d] - 1) * p.dilation[d]
            first = -((reach - lo[2 + d] - p.before[d]) // p.stride[d])
            last = (hi[2 + d] - 1 + p.before[d]) // p.stride[d]
            low.append(min(max(first, 0), n - 1))
            high.append(max(min(last, n - 1), low[-1]) + 1)
        read = tuple(low), tuple(high)
        return [Access(0, *read), Access(1, *read), Access(2, lo, hi, write=True)]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        p, out = sig.read(UnpoolParams), sig.operands[2]
        declare = (
            text.operand(sig, 0, "p0")
            + text.operand(sig, 1, "p1")
            + text.operand(sig, 2, "p2", const=False)
        )
        single = (in_order if not machine.cooperative else each_index)(
            p.tile, fold(out.shape), _one(sig)
        )
        many = vector(p, p.tile, sig) if machine.cooperative else 1
        if many > 1 and _in_blocks(sig):
            single = text.where_aligned(sig, (0, 1, 2), _walk_blocks(sig, many), single)
        elif many > 1:
            single = text.where_aligned(sig, (0, 1, 2), _walk_vectors(sig, many), single)
        return text.function(name, declare + single)


def _over_windows(sig: Signature, body: str) -> str:
    """C++ statements that run `body` for each window that contains a pixel. In it, o0, o1... is the
    index of the window, and `tap` the number of the pixel in the window.
    """
    p, values = sig.read(UnpoolParams), sig.operands[0].shape
    names = indices(sig.operands[2].shape)
    taps = [f"k{d} * {math.prod(p.size[d + 1 :])}" for d in range(len(p.size))]
    body = f"      const float tap = static_cast<float>({' + '.join(taps)});\n{body}"
    for d in range(len(p.size) - 1, -1, -1):
        listed = ", ".join(
            map(str, (p.size[d], p.stride[d], p.dilation[d], p.before[d], values[2 + d]))
        )
        body = (
            f"    ark_each_window_of<{listed}>({names[2 + d]}, [&](int o{d}, int k{d}) {{\n"
            f"{body}    }});\n"
        )
    return body


def _at(sig: Signature) -> list[str]:
    names = indices(sig.operands[2].shape)
    return [*names[:2], *(f"o{d}" for d in range(len(names) - 2))]


def _one(sig: Signature) -> str:
    """C++ statements that compute one pixel and store it."""
    at = _at(sig)
    value = text.load(sig, 0, "p0", text.offset(sig, 0, at))
    place = text.load(sig, 1, "p1", text.offset(sig, 1, at))
    inner = f"      if ({place} == tap) total += {value};\n"
    store = text.store(sig, 2, "p2", text.offset(sig, 2, indices(sig.operands[2].shape)), "total")
    return f"    float total = 0.0f;\n{_over_windows(sig, inner)}    {store}\n"


def _walk_vectors(sig: Signature, many: int) -> str:
    """Statements in which all threads compute neighbouring pixels as vectors."""
    out, at = sig.operands[2], _at(sig)
    names = indices(out.shape)
    each = f"#pragma unroll\n    for (int j = 0; j < {many}; ++j)"
    value, place = text.load(sig, 0, "values.v", "j"), text.load(sig, 1, "places.v", "j")
    inner = (
        f"      const auto places = ark_load_pack<{many}>(p1 + {text.offset(sig, 1, at)});\n"
        f"      const auto values = ark_load_pack<{many}>(p0 + {text.offset(sig, 0, at)});\n"
        f"{each} total[j] += {place} == tap ? {value} : 0.0f;\n"
    )
    body = (
        f"    float total[{many}] = {{}};\n{_over_windows(sig, inner)}"
        f"    ArkPack<{out.ctype}, {many}> made;\n"
        f"{each} {text.store(sig, 2, 'made.v', 'j', 'total[j]')}\n    return made;\n"
    )
    store = f"ark_store_pack<{many}>(p2 + {text.offset(sig, 2, names)}, made);"
    box_of = tile_type(sig.read(UnpoolParams).tile, fold(out.shape))
    listed = ", ".join(f"int {i}" for i in NAMES)
    unused = " ".join(f"(void){i};" for i in NAMES)
    return (
        f"  ark_each_window_pack<{box_of}, {many}, 1>(t.coord,\n"
        f"      [&]({listed}) {{\n    {unused}\n{body}  }},\n"
        f"      [&](const ArkPack<{out.ctype}, {many}>& made, {listed}) "
        f"{{ {unused} {store} }});\n"
    )


def _in_blocks(sig: Signature) -> bool:
    """True if blocks of neighbouring pixels read the same windows, and the image and its tiles have
    whole blocks. The image has channels last and two spatial dimensions.
    """
    p, shape = sig.read(UnpoolParams), sig.operands[2].shape
    plain = len(p.size) == BLOCK_DIMENSIONS + 1 and p.dilation == (1,) * len(p.size)
    return plain and all(
        p.before[d] < p.size[d] and p.tile[1 + d] % p.stride[d] == shape[2 + d] % p.stride[d] == 0
        for d in range(BLOCK_DIMENSIONS)
    )


def _walk_blocks(sig: Signature, many: int) -> str:
    """Statements in which all threads compute blocks of neighbouring pixels as vectors."""
    p, values, out = sig.read(UnpoolParams), sig.operands[0].shape, sig.operands[2]
    lines = [
        f"ArkBlockWindows<{p.size[d]}, {p.stride[d]}, {p.before[d]}, {values[2 + d]}>"
        for d in range(BLOCK_DIMENSIONS)
    ]
    box_of = tile_type(p.tile, fold(out.shape))
    constants = (box_of, many, BLOCKS_IN_FLIGHT, *lines, out.ctype)
    names = indices(out.shape)
    listed = ", ".join(f"int {i}" for i in NAMES)
    unused = " ".join(f"(void){i};" for i in NAMES)
    loads = [
        f"[&]({listed}) {{ {unused} "
        f"return ark_load_pack<{many}>(p{i} + {text.offset(sig, i, names)}); }}"
        for i in (0, 1)
    ]
    stored = f"ark_store_pack<{many}>(p2 + {text.offset(sig, 2, names)}, made);"
    return (
        f"  ark_unpool_blocks<{', '.join(map(str, constants))}>(t.coord,\n"
        f"      {loads[0]},\n      {loads[1]},\n"
        f"      [&](const ArkPack<{out.ctype}, {many}>& made, {listed}) {{ {unused} {stored} }});\n"
    )


register(Unpool())
