"""Row-wise tiles: softmax, layernorm, rmsnorm over the last dimension, and reductions over any.

`rownorm` params: function, eps, rows (rows of dimension 2 per task). operands: input, [weight],
output. coord: first index of dimensions 0 to 2. A row is held in registers by a warp or the block
where it fits, in shared memory where that holds it, and is read again where not.
`reduce` params: function, axis (of 4, or of all where there are more), count (what a mean divides
by), tile (4 sizes of the output, 1 along the axis; more dimensions are folded, ark.ir.fold).
operands: input, output. coord: the tile's first index.
rows.h has the device side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ark.ir.fold import fold, unfold
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register, whole
from ark.plan.params import (
    FLOAT_NAMES,
    INTEGER_NAMES,
    Dim,
    Epsilon,
    Params,
    Places,
    Rows,
    Size,
    Tile,
    box,
    count,
    covers,
    fits,
    need,
    shaped,
    typed,
)
from ark.tasks import expression, text
from ark.tasks.pointwise import tile_box

_ROW_OPS = {"softmax": "ArkSoftmax", "layernorm": "ArkLayerNorm", "rmsnorm": "ArkRmsNorm"}
HELD = 32  # elements of a row that a thread keeps in registers, and bytes that wait for it there
HELD_BYTES = 64
BATCH = 16  # elements of several rows at once
SIDE_BY_SIDE = 16  # sums of one thread that runs alone, for vectors


def _packs(sig: Signature, columns: int) -> int:
    """Elements of a pack of a row of `columns`: input and output are moved in 16 bytes or less."""
    pack = 16 // min(sig.operands[0].itemsize, sig.operands[-1].itemsize)
    pack = min(8, pack)
    strides = [s for o in (sig.operands[0], sig.operands[-1]) for s in o.strides[:-1]]
    while pack > 1 and (columns % pack or any(s % pack for s in strides)):
        pack //= 2
    return pack


def row_places(shape: Sequence[int], rows: int) -> Places:
    """Coordinates of tasks of `rows` rows of a folded shape."""
    return box((*fold(shape)[:3], 1), (1, 1, rows, 1))


def row_box(
    shape: Sequence[int], coord: Sequence[int], rows: int, columns: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The indices of such a task's rows, of all columns or the first ones."""
    sizes = fold(shape)
    last = min(coord[2] + rows, sizes[2])
    hi = (coord[0] + 1, coord[1] + 1, last, sizes[3] if columns is None else columns)
    return unfold(shape, (*coord[:3], 0), hi)


class RowNormParams(Params, frozen=True):
    function: Literal["softmax", "layernorm", "rmsnorm"]
    rows: Rows
    eps: Epsilon = 0.0


class RowNorm(TaskKind):
    name = "rownorm"
    params = RowNormParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        weighted = sig.params["function"] == "rmsnorm"
        count(sig, 3 if weighted else 2)
        shape = typed(sig, 0).shape
        shaped(sig, len(sig.operands) - 1, shape)
        if weighted:
            shaped(sig, 1, shape[-1:], dense=True)
        fits((sig.params["rows"],), fold(shape)[2:3])

    def places(self, sig: Signature) -> Places:
        return row_places(sig.operands[-1].shape, sig.params["rows"])

    def in_place(self, sig: Signature) -> frozenset[int]:
        return frozenset({0})

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        out = len(sig.operands) - 1
        box = row_box(sig.operands[out].shape, coord, sig.params["rows"])
        found = [Access(0, *box), Access(out, *box, write=True)]
        if out == 2:
            found.append(whole(1, sig.operands[1]))
        return found

    def scratch(self, sig: Signature, machine: Machine) -> int:
        columns = sig.operands[-1].shape[-1]
        folds = 2 * BATCH * 4 * machine.warps
        return folds + (4 * columns if self._kept(sig, machine) else 0)

    def _kept(self, sig: Signature, machine: Machine) -> bool:
        """Does a row that registers do not hold fit into shared memory?"""
        columns = sig.operands[-1].shape[-1]
        room = (machine.shared_bytes - machine.ring_bytes) // 2
        return self._held(sig, machine) is None and 4 * columns <= room

    def _held(self, sig: Signature, machine: Machine) -> tuple[int, int, int, int] | None:
        """(pack, packs a thread, rows at once, warps of a team) if registers hold the rows."""
        columns = sig.operands[-1].shape[-1]
        pack = _packs(sig, columns)
        if machine.has("single_thread"):
            return None
        itemsize = sig.operands[0].itemsize
        teams = [1, machine.warps]
        if machine.has("named_barriers"):
            teams = sorted({*teams, *(t for t in (2, 4, 8) if machine.warps % t == 0)})
        for team in teams:
            packs = -(-columns // (pack * machine.lanes * team))
            held = packs * pack
            if held <= HELD and (held * itemsize <= HELD_BYTES or team == machine.warps):
                return pack, packs, max(1, min(BATCH, BATCH // (packs * pack))), team
        return None

    def headers(self) -> tuple[str, ...]:
        return (text.header("rows.h"),)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        out = len(sig.operands) - 1
        shape = fold(sig.operands[out].shape)
        rows, columns = sig.params["rows"], shape[3]
        names = text.indices(sig.operands[out].shape, ["i0", "i1", "(i2 + r)", "0"])
        op, eps = _ROW_OPS[sig.params["function"]], text.literal(sig.params.get("eps", 0.0))
        weight = "ArkOnes()" if out == 1 else "pw"
        body = text.operand(sig, 0, "p0") + text.operand(sig, out, "po", const=False)
        if out == 2:
            body += text.operand(sig, 1, "pw")
        folds = 2 * BATCH * 4 * machine.warps
        body += (
            "  const int i0 = t.coord[0], i1 = t.coord[1], i2 = t.coord[2];\n"
            "  (void)i0; (void)i1;\n"
            f"  const int rows = i2 + {rows} < {shape[2]} ? {rows} : {shape[2]} - i2;\n"
            "  const auto at = [=](int r, ark_i64& from, ark_i64& to) {\n"
            f"    from = {text.offset(sig, 0, names)};\n"
            f"    to = {text.offset(sig, out, names)};\n  }};\n"
            "  char* red = ARK_SCRATCH(c);\n"
        )
        side = SIDE_BY_SIDE if machine.has("single_thread") else 1
        keep = "true" if self._kept(sig, machine) else "false"
        loose = (
            f"  ark_rows_any<{op}, {side}, {keep}>(p0, po, {weight}, rows, {columns}, {eps}, red, "
            f"reinterpret_cast<float*>(red + {folds}), at);\n"
        )
        held = self._held(sig, machine)
        if held is None:
            return text.function(name, body + loose)
        pack, packs, batch, team = held
        tight = (
            f"  ark_rows_held<{op}, {columns}, {pack}, {packs}, {batch}, {team}>"
            f"(p0, po, {weight}, rows, {eps}, red, at);\n"
        )
        if pack > 1:
            addresses = " | ".join(f"t.operand[{i}]" for i in range(out + 1))
            tight = f"  if (ark_aligned({addresses})) {{\n{tight}  }} else {{\n{loose}  }}\n"
        return text.function(name, body + tight)


_FOLDS = {
    "sum": "ArkAddFold",
    "mean": "ArkAddFold",
    "max": "ArkMaxFold",
    "min": "ArkMinFold",
    "prod": "ArkMulFold",
}
COLUMNS = 64  # neighbouring results that a block reduces at once, where not the last dimension is
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
        return (text.header("rows.h"),)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        tile = sig.params["tile"]
        value = "v"
        if sig.params["function"] == "mean":
            value = f"v / {text.literal(sig.params['count'])}"
        join, compute = _FOLDS[sig.params["function"]], _compute(sig)
        declare = text.operand(sig, 0, "p0") + text.operand(sig, 1, "po", const=False)
        declare += "  char* red = ARK_SCRATCH(c);\n"
        if self._last(sig):
            loops = self._rows(sig, tile, machine, join, compute, value)
        else:
            loops = self._columns(sig, tile, machine, join, compute, value)
        return text.function(name, declare + loops)

    def _rows(
        self,
        sig: Signature,
        tile: Sequence[int],
        machine: Machine,
        join: str,
        compute: str,
        value: str,
    ) -> str:
        """Rows of the tile, numbered by their indices; each is a warp's if there are enough."""
        shape = fold(sig.operands[0].shape)
        text_rows = "".join(
            f"  const int n{d} = t.coord[{d}] + {tile[d]} < {shape[d]} ? {tile[d]} : "
            f"{shape[d]} - t.coord[{d}];\n"
            for d in range(3)
        )
        split = (
            "    const int i2 = t.coord[2] + r % n2; r /= n2;\n"
            "    const int i1 = t.coord[1] + r % n1, i0 = t.coord[0] + r / n1;\n"
            "    (void)i0; (void)i1; (void)i2;\n"
        )
        names = text.indices(sig.operands[1].shape, ["i0", "i1", "i2", "0"])
        many = math.prod(tile[:3]) >= machine.warps
        body = (
            f"{text_rows}  const auto at = [=](int r) -> ark_i64 {{\n{split}"
            f"    return {text.offset(sig, 0, names)};\n  }};\n"
            f"  const auto finish = [=](int r, {compute} v) {{\n{split}"
            f"    {text.store(sig, 1, 'po', text.offset(sig, 1, names), value)}\n  }};\n"
        )
        pack = self._pack(sig)
        alone = machine.has("single_thread")

        def call(width: int, rounds: int) -> str:
            return (
                f"  ark_reduce_rows<{join}, {compute}, {width}, {rounds}, {str(many).lower()}>"
                f"(p0, n0 * n1 * n2, {shape[3]}, red, at, finish);\n"
            )

        if alone:
            return body + call(SIDE_BY_SIDE, 1)
        if pack == 1:
            return body + call(1, DEEP_PACKS)
        return (
            f"{body}  if (ark_aligned(t.operand[0])) {{\n{call(pack, DEEP_PACKS)}"
            f"  }} else {{\n{call(1, DEEP_PACKS)}  }}\n"
        )

    def _columns(
        self,
        sig: Signature,
        tile: Sequence[int],
        machine: Machine,
        join: str,
        compute: str,
        value: str,
    ) -> str:
        """For each index of the outer dimensions, blocks of neighbouring columns."""
        axis = sig.params["axis"]
        count = text.pad4(sig.operands[0].shape, 1)[axis]
        stride = text.pad4(sig.operands[0].strides, 0)[axis]
        shape = fold(sig.operands[1].shape)
        names = text.indices(sig.operands[1].shape, ["i0", "i1", "i2", "x"])
        inner = list(names)
        inner[axis] = "0"
        alone = machine.has("single_thread")
        pack, across = self._across(sig, machine)
        block = tile[3] if alone else across * pack
        end = f"t.coord[3] + {tile[3]} < {shape[3]} ? t.coord[3] + {tile[3]} : {shape[3]}"
        body = (
            f"  const int e3 = {end};\n"
            f"  for (int x = t.coord[3]; x < e3; x += {block}) {{\n"
            f"    const int columns = e3 - x < {block} ? e3 - x : {block};\n"
            f"    const auto* from = p0 + {text.offset(sig, 0, inner)};\n"
            f"    auto* to = po + {text.offset(sig, 1, names)};\n"
            f"    const auto finish = [=](int k, {compute} v) {{ "
            f"{text.store(sig, 1, 'to', 'k', value)} }};\n"
        )
        arguments = f"(from, {stride}, columns, {count}, red, finish);\n"
        if alone:
            body += f"    ark_reduce_columns_alone<{join}, {compute}>{arguments}"
        else:

            def call(width: int, wide: int) -> str:
                return (
                    f"    ark_reduce_columns<{join}, {compute}, {width}, {DEEP_PACKS}, {wide}>"
                    + arguments
                )

            scalar = min(machine.lanes * machine.warps, across * pack)
            if pack == 1 or scalar != across * pack:
                body += call(1, scalar)
            else:
                body += (
                    f"    if (ark_aligned(t.operand[0])) {{\n{call(pack, across)}"
                    f"    }} else {{\n{call(1, scalar)}    }}\n"
                )
        body += "  }\n"
        for d in (2, 1, 0):
            if shape[d] == 1 or tile[d] == 1:
                at = "0" if shape[d] == 1 else f"t.coord[{d}]"
                body = f"  {{ const int i{d} = {at}; (void)i{d};\n{body}  }}\n"
                continue
            last = f"t.coord[{d}] + {tile[d]}"
            body = (
                f"  for (int i{d} = t.coord[{d}]; i{d} < {last} && i{d} < {shape[d]}; ++i{d}) {{\n"
                f"{body}  }}\n"
            )
        return body


register(RowNorm())
register(Reduce())
