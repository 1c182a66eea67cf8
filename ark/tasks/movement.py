"""Tiles that move elements or work on neighbours: transpose, rope, kv_append, argmax.

`transpose` params: perm (of 4 dimensions, or of all where there are more), tile of the output (of
4, more are folded: ark.ir.fold). operands: input, output. coord: the tile's first index. `rope`
params: tile (even in the last dimension). operands: input, other (broadcast), output. coord: the
tile's first index. `kv_append` operands: rows (m, heads * width), position (1,), cache (heads,
context, width). coord: head. `argmax` params: rows (of dimension 2 per task). operands: input
(..., n), output (..., 1). coord: first index of dimensions 0 to 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Annotated

import msgspec

from ark.ir.fold import fold
from ark.ir.values import MAX_DIMS
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import (
    INDEX_NAMES,
    INT_MAX,
    Dim,
    Params,
    Places,
    Rows,
    Tile,
    box,
    count,
    covers,
    fits,
    matrix,
    need,
    shaped,
    typed,
)
from ark.tasks import text
from ark.tasks.pointwise import COPY, broadcast_access, broadcasts, tile_box, write_box
from ark.tasks.rows import row_box, row_places

NAMES = ["i0", "i1", "i2", "i3"]
SQUARE = 64  # elements of a side of what is turned through shared memory at once


def _header(name: str) -> str:
    return resources.files("ark.tasks").joinpath(name).read_text()


class TransposeParams(Params, frozen=True):
    perm: Annotated[tuple[Dim, ...], msgspec.Meta(min_length=4, max_length=MAX_DIMS)]
    tile: Tile


class Transpose(TaskKind):
    name = "transpose"
    params = TransposeParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2)
        perm, (source, out) = sig.params["perm"], sig.operands
        rank = max(4, len(out.shape))
        pad = rank - len(out.shape)
        need(
            sorted(perm) == list(range(rank)) and list(perm[:pad]) == list(range(pad)),
            f"{list(perm)} is no permutation of {len(out.shape)} dimensions",
        )
        before, after = text.pad4(source.shape, 1), text.pad4(out.shape, 1)
        need(
            len(source.shape) == len(out.shape)
            and all(before[p] == n for p, n in zip(perm, after, strict=True)),
            f"{list(source.shape)} does not become {list(out.shape)}",
        )
        need(source.dtype == out.dtype, f"{source.dtype} does not become {out.dtype}")
        need(source.per_item == 1, f"{source.dtype} has several elements in a byte")
        covers(sig.params["tile"], out.shape)

    def places(self, sig: Signature) -> Places:
        return box(fold(sig.operands[1].shape), sig.params["tile"])

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        shape, perm = sig.operands[1].shape, sig.params["perm"]
        lo, hi = tile_box(shape, coord, sig.params["tile"])
        pad = len(perm) - len(shape)
        low, high = [0] * len(shape), [0] * len(shape)
        for d, p in enumerate(perm[pad:]):
            low[p - pad], high[p - pad] = lo[d], hi[d]
        return [Access(0, tuple(low), tuple(high)), Access(1, lo, hi, write=True)]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        size = sig.operands[0].itemsize
        return SQUARE * (SQUARE * size + 4) if not machine.has("single_thread") else 0

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        perm, tile = sig.params["perm"], sig.params["tile"]
        names = text.indices(sig.operands[1].shape, NAMES)
        places = [""] * len(perm)
        for d, p in enumerate(perm):
            places[p] = names[d]
        last = len(perm) - 1
        if perm.index(last) <= last - 3 and last > 3:
            return text.function(name, write_box(sig, COPY, tile, machine, places={0: places}))
        if perm[-1] == last:
            return text.function(name, write_box(sig, COPY, tile, machine, places={0: places}))
        # Squares of the target's last dimension and the one that is the source's last.
        turned = perm.index(last) - (last - 3)
        shape = fold(sig.operands[1].shape)
        size = sig.operands[1].itemsize
        from_row = text.pad4(sig.operands[0].strides, 0)[perm[-1]]
        to_row = text.pad4(sig.operands[1].strides, 0)[perm.index(last)]
        body = text.operand(sig, 0, "p0") + text.operand(sig, 1, "po", const=False)
        index = ""
        sides = []
        for d in (turned, 3, *(d for d in (2, 1, 0) if d != turned)):
            side = SQUARE if d in (turned, 3) else 1
            left = f"{shape[d]} - t.coord[{d}]"
            body += (
                f"  const int n{d} = {tile[d]} < {left} ? {tile[d]} : {left};\n"
                f"  const int s{d} = (n{d} + {side - 1}) / {side};\n"
            )
            index += f"    const int i{d} = t.coord[{d}] + s % s{d} * {side}; s /= s{d};\n"
            sides.append(f"s{d}")
        ctype = sig.operands[1].ctype
        body += (
            f"  const auto place = [=](int s) -> ArkSquare<{ctype}> {{\n{index}"
            "    (void)i0; (void)i1; (void)i2; (void)i3;\n"
            f"    const int rows = t.coord[3] + n3 - i3, columns = t.coord[{turned}] + n{turned} - "
            f"i{turned};\n"
            f"    return ArkSquare<{ctype}>{{p0 + {text.offset(sig, 0, places)}, "
            f"po + {text.offset(sig, 1, names)}, rows < {SQUARE} ? rows : {SQUARE},\n"
            f"        columns < {SQUARE} ? columns : {SQUARE}}};\n  }};\n"
            f"  const int squares = {' * '.join(sides)};\n"
        )
        arguments = f"squares, {from_row}, {to_row}"
        if machine.has("single_thread"):
            body += f"  ark_transpose_alone<{SQUARE}, {ctype}>({arguments}, place);\n"
            return _header("transpose.h") + text.function(name, body)

        def call(pack: int) -> str:
            packs = -(-SQUARE * SQUARE // (pack * machine.lanes * machine.warps))
            many = max(1, 4 // packs) if pack > 1 else 1
            return (
                f"  ark_transpose<{SQUARE}, {pack}, {many}, {ctype}>"
                f"({arguments}, ARK_SCRATCH(c), place);\n"
            )

        pack = min(8, 16 // size)
        lengths = (shape[3], shape[turned], tile[3], tile[turned])
        strides = [s for o in sig.operands for s in o.strides if s != 1]
        while pack > 1 and any(n % pack for n in (*lengths, *strides)):
            pack //= 2
        if pack == 1:
            return _header("transpose.h") + text.function(name, body + call(1))
        body += (
            f"  if (ark_aligned(t.operand[0] | t.operand[1])) {{\n{call(pack)}  }} else {{\n"
            f"{call(1)}  }}\n"
        )
        return _header("transpose.h") + text.function(name, body)


class RopeParams(Params, frozen=True):
    tile: Tile


class Rope(TaskKind):
    name = "rope"
    params = RopeParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 3)
        for index in range(3):
            typed(sig, index)
            broadcasts(sig, index, 2)
        widths = {o.shape[-1] for o in sig.operands}
        tile = sig.params["tile"]
        need(len(widths) == 1 and max(widths) % 2 == 0 == tile[3] % 2, "pairs are torn apart")
        covers(tile, sig.operands[2].shape)

    def places(self, sig: Signature) -> Places:
        return box(fold(sig.operands[2].shape), sig.params["tile"])

    def in_place(self, sig: Signature) -> frozenset[int]:
        return frozenset({0, 1})

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        lo, hi = tile_box(sig.operands[2].shape, coord, sig.params["tile"])
        return [broadcast_access(sig, i, lo, hi, i == 2) for i in range(3)]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        """One pair per index of a box whose last dimension counts pairs."""
        shape = fold(sig.operands[2].shape)
        tile = sig.params["tile"]
        body = "".join(text.operand(sig, i, f"p{i}", const=i != 2) for i in range(3))
        names = text.indices(sig.operands[2].shape, NAMES)
        first, second = [*names[:-1], "j"], [*names[:-1], "(j + 1)"]
        values = ""
        for letter, index in zip("ab", range(2), strict=True):
            for part, names in (("r", first), ("i", second)):
                at = text.offset(sig, index, names)
                values += f"    const float {letter}{part} = ark_get(p{index}, {at});\n"
        inner = (
            values + f"    ark_put(p2, {text.offset(sig, 2, first)}, ar * br - ai * bi);\n"
            f"    ark_put(p2, {text.offset(sig, 2, second)}, ar * bi + ai * br);\n"
        )
        counts = ", ".join(
            f"n{d} = (t.coord[{d}] + {tile[d]} < {shape[d]} ? "
            f"{tile[d]} : {shape[d]} - t.coord[{d}])"
            for d in range(4)
        )
        body += (
            f"  const int {counts};\n"
            "  const int pairs = n0 * n1 * n2 * (n3 / 2);\n"
            "  for (int e = ark_tid(); e < pairs; e += ARK_THREADS) {\n"
            "    int r = e;\n"
            "    const int j = t.coord[3] + r % (n3 / 2) * 2; r /= n3 / 2;\n"
            "    const int i2 = t.coord[2] + r % n2; r /= n2;\n"
            "    const int i1 = t.coord[1] + r % n1; r /= n1;\n"
            "    const int i0 = t.coord[0] + r;\n"
            "    (void)i0; (void)i1; (void)i2;\n" + inner + "  }\n"
        )
        return text.function(name, body)


class KvAppend(TaskKind):
    name = "kv_append"

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 3)
        rows, columns = matrix(sig, 0)
        shaped(sig, 1, (1,), "int32")
        cache = typed(sig, 2).shape
        need(
            len(cache) == 3 and columns == cache[0] * cache[2] and rows * cache[2] <= INT_MAX,
            f"rows of {columns} are not of a cache of shape {list(cache)}",
        )

    def places(self, sig: Signature) -> Places:
        return Places((range(sig.operands[2].shape[0]),))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        rows = sig.operands[0].shape[0]
        _, context, width = sig.operands[2].shape
        head = coord[0]
        return [
            Access(0, (0, head * width), (rows, (head + 1) * width)),
            whole(1, sig.operands[1]),
            Access(2, (head, 0, 0), (head + 1, context, width), write=True, append_only=True),
        ]

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        return 0.0, 2.0 * sig.operands[0].shape[0] * sig.operands[2].shape[2] * 4

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        rows = sig.operands[0].shape[0]
        _, context, width = sig.operands[2].shape
        source = text.offset(sig, 0, ["0", "0", "r", f"t.coord[0] * {width} + d"])
        target = text.offset(sig, 2, ["0", "t.coord[0]", "(p1[0] + r)", "d"])
        body = (
            text.operand(sig, 0, "p0")
            + text.operand(sig, 1, "p1")
            + text.operand(sig, 2, "p2", const=False)
            + f"  for (int e = ark_tid(); e < {rows * width}; e += ARK_THREADS) {{\n"
            f"    const int r = e / {width}, d = e % {width};\n"
            f"    if (p1[0] + r < 0 || p1[0] + r >= {context}) continue;\n"
            f"    ark_put(p2, {target}, ark_get(p0, {source}));\n  }}\n"
        )
        return text.function(name, body)


class ArgMaxParams(Params, frozen=True):
    rows: Rows


class ArgMax(TaskKind):
    name = "argmax"
    params = ArgMaxParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2)
        shape = typed(sig, 0).shape
        shaped(sig, 1, (*shape[:-1], 1), *INDEX_NAMES)
        fits((sig.params["rows"],), fold(shape)[2:3])

    def places(self, sig: Signature) -> Places:
        return row_places(sig.operands[0].shape, sig.params["rows"])

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        shape, rows = sig.operands[0].shape, sig.params["rows"]
        return [
            Access(0, *row_box(shape, coord, rows)),
            Access(1, *row_box(shape, coord, rows, columns=1), write=True),
        ]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return 8 * machine.warps

    def headers(self) -> tuple[str, ...]:
        return (text.header("sampling.h"),)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        shape = fold(sig.operands[0].shape)
        names = text.indices(sig.operands[0].shape, ["t.coord[0]", "t.coord[1]", "i2", "k"])
        source = text.offset(sig, 0, names)
        target = text.offset(sig, 1, names)
        rows = sig.params["rows"]
        body = (
            text.operand(sig, 0, "p0")
            + text.operand(sig, 1, "po", const=False)
            + f"  for (int i2 = t.coord[2]; i2 < t.coord[2] + {rows} && i2 < {shape[2]}; ++i2) {{\n"
            "    float best = -ark_inf();\n    ark_u32 at = 0xffffffffu;\n"
            f"    for (int k = ark_tid(); k < {shape[3]}; k += ARK_THREADS) {{\n"
            f"      const float v = ark_get(p0, {source});\n"
            "      if (v > best || at == 0xffffffffu) "
            "{ best = v; at = static_cast<ark_u32>(k); }\n    }\n"
            "    ark_best(best, at, reinterpret_cast<float*>(ARK_SCRATCH(c)));\n"
            f"    if (ark_tid() == 0) po[{target}] = static_cast<{sig.operands[1].ctype}>(at);\n"
            "    ark_sync();\n  }\n"
        )
        return text.function(name, body)


for _kind in (Transpose(), Rope(), KvAppend(), ArgMax()):
    register(_kind)
