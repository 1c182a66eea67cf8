"""The task kind `matmul`: tiles of matrix products with any transposes, batches and broadcasts.
Sums are accumulated in fp32, or in int32 for int8. Emitted by ark.lower.ops.matmul.

operands: a, b, output. coord: batch indices in dimensions 0 and 1 of the output, first row, first
column. params: transpose_a, transpose_b, tile (rows, columns), tf32, and further ones:

expr: a tree of ark.tasks.expression, whose value is stored. Its operand 0 is the sum; the others
are the operands after the output, which broadcast to it.

gated: neighbouring columns of the product are a gate and the value that it scales. The output has
half as many columns, silu(gate) * value. This needs a single matrix and excludes expr.

heads, kv_heads, head_dim: the product's columns are queries, keys and values, which are rotated and
stored as by rope_kv (ark.tasks.rotary). The output is then the queries. It is followed by position,
frequencies, the two caches (to which the tile's rows are appended) and, if they are given, the page
table and `fresh`. Rows of several sequences need one tile of all rows.

rotary: the product's columns are heads of this width. The sums, or the values of expr, are rotated:
pair i of a head consists of its elements i and i + width / 2. The last two operands are the cosines
and sines, (rows, width / 2) each. Row m of the product uses their row m modulo `rows`.

tasks, group: a task has several tiles. Tiles are numbered down `group` rows of tiles, then along
the columns, then through the next rows and the next matrix. The task with coord (r,) has the tiles
r, r + tasks and so on, so that tasks which run at the same time read the same data.

splits: k is split into this many parts (split-K). Each part gives a matrix of fp32 sums, and a
later op adds these matrices. The third-last dimension of the output counts the parts. Parts begin
at multiples of K_PART_ALIGNMENT_BYTES.

windows: one operand is the matrix of an input's windows (ark.tasks.matmul_windows).

pixels: k counts the pixels of images (ark.tasks.matmul_pixels).

This kind writes a device function that works on every machine. A vendor replaces it by a function
of its own if its matrix units support the signature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ark.errors import PlanError
from ark.ir.fold import fold, unfold
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, bytes_of, register
from ark.plan.params import INT_MAX, Places, box, count, fits, matrix, need, typed
from ark.tasks import expression, matmul_pixels, matmul_small, matmul_windows, text
from ark.tasks.elementwise import broadcast_access, broadcasts
from ark.tasks.matmul_codes import row_type
from ark.tasks.matmul_codes import served as served_codes
from ark.tasks.matmul_form import (
    POSITION_OPERAND,
    by_halves,
    dims,
    ends,
    grid,
    paired,
    part_of_k,
    rotates,
    sums_of,
    tiles,
)
from ark.tasks.matmul_params import MatmulParams
from ark.tasks.matmul_text import staged, write
from ark.tasks.matmul_thin import passes, rounds_of_sums, scratch, served
from ark.tasks.matmul_windows import side_shape
from ark.tasks.rotary import page_texts, rotary_accesses, rotary_check, sequences_of
from ark.tasks.row_values import check_rows


class Matmul(TaskKind):
    name = "matmul"
    params = MatmulParams
    headers = text.headers(
        "rotary.h",
        "gates.h",
        "tiles.h",
        "matmul.h",
        "matmul_thin.h",
        "matmul_small.h",
        "convolution.h",
    )

    def check(self, sig: Signature) -> None:
        super().check(sig)
        params = sig.read(MatmulParams)
        tree, others = params.expr, [sig.operands[i] for i in ends(sig)]
        named = sum(n > 0 for n in (params.heads, params.kv_heads, params.head_dim))
        need(named in (0, 3), "heads, kv_heads and head_dim must be given together")
        if rotates(sig):
            need(
                tree is None and not params.gated,
                "a matmul with rotary embedding cannot have an epilogue expression or a gate",
            )
            count(sig, 7, 8, 9)
        elif tree is None:
            count(sig, 3 + 2 * by_halves(sig))
        else:
            need(len(sig.operands) >= 3, "the output operand is missing")
            expression.check(tree, [sums_of(sig), *(o.dtype for o in others)])
            need(
                not expression.places(tree),
                "the expression of a matmul cannot use the indices of elements",
            )
            for index in ends(sig):
                broadcasts(sig, index, 2)
        _check_types(sig)
        if params.windows:
            matmul_windows.check(sig)
        if params.pixels is not None:
            matmul_pixels.check(sig, params.pixels)
        a, b, out = side_shape(sig, 0), side_shape(sig, 1), sig.operands[2].shape
        need(min(len(a), len(b), len(out)) >= 2, "an operand has fewer than 2 dimensions")
        m, n, k = dims(sig)
        if by_halves(sig):
            _check_halves(sig, n)
        elif paired(sig):
            need(
                tree is None and len(out) == 2,
                "a gated or rotated product needs one matrix and no expr",
            )
            need(
                params.tile[1] % 2 == 0,
                f"tile columns of a gated or rotated product must be even, got {params.tile[1]}",
            )
        if rotates(sig):
            rotary_check(sig, 2, POSITION_OPERAND, (m, n))
            need(
                sequences_of(sig, POSITION_OPERAND) == 1 or params.tile[0] >= m,
                "rows of several sequences in a matmul with rotary embedding need one tile",
            )
        left = a[-2:][::-1] if params.transpose_a else a[-2:]
        right = b[-2:][::-1] if params.transpose_b else b[-2:]
        need(
            left == (m, k) and right == (k, n),
            f"operands {list(left)} and {list(right)} do not multiply to {[m, n]}",
        )
        for shape in (a, b):
            need(
                len(shape) <= len(out)
                and all(x in (1, y) for x, y in zip(shape[-3::-1], out[-3::-1], strict=False)),
                f"the batch of {list(shape)} does not broadcast to {list(out)}",
            )
        fits(params.tile, (m, n))
        _check_splits(sig, k)
        many = math.prod(grid(sig))
        need(many <= INT_MAX, f"{many} tiles exceed 32-bit coordinates")
        need(
            params.tasks <= many,
            f"got {params.tasks} tasks for {many} tiles; expected at most one task per tile",
        )

    def places(self, sig: Signature) -> Places:
        params = sig.read(MatmulParams)
        if params.tasks:
            return Places((range(params.tasks),))
        shape = fold(sig.operands[2].shape)
        return box((*shape[:2], *dims(sig)[:2]), (1, 1, *params.tile))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        accesses: dict[Access, None] = {}  # without repetitions: tiles may read the same rows
        for tile in tiles(sig, coord):
            accesses.update(dict.fromkeys(self._touched(sig, tile)))
        return list(accesses)

    def _touched(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        params = sig.read(MatmulParams)
        m, n, k = dims(sig)
        rows, columns = params.tile
        m1, n1 = min(coord[2] + rows, m), min(coord[3] + columns, n)
        k0, k1 = 0, k
        if (part := part_of_k(sig)) < k:
            k0, k1 = coord[1] * part, min((coord[1] + 1) * part, k)
        a_box = ((coord[2], k0), (m1, k1))
        b_box = ((k0, coord[3]), (k1, n1))
        if params.transpose_a:
            a_box = ((k0, coord[2]), (k1, m1))
        if params.transpose_b:
            b_box = ((coord[3], k0), (n1, k1))
        if row_type(sig.operands[1]) is not None:  # scales are at the end of a row
            b_box = ((coord[3], 0), (n1, k))
        windows = params.windows
        sides = ((0, a_box, (coord[2], m1)), (1, b_box, (coord[3], n1)))
        accesses = [
            Access(i, *matmul_pixels.touched(sig, i, places, (k0, k1), params.pixels))
            if params.pixels is not None
            else Access(i, *matmul_windows.touched(sig, coord, *places))
            if windows is not None and windows.side == i
            else Access(i, *self._batched(sig, i, coord, box))
            for i, box, places in sides
        ]
        if params.gated:
            halves = ((coord[2], coord[3] // 2), (m1, n1 // 2))
            return [*accesses, Access(2, *halves, write=True)]
        if rotates(sig):
            turned = (coord[2], m1) if sequences_of(sig, POSITION_OPERAND) == 1 else (0, 0)
            return [*accesses, *rotary_accesses(sig, 2, POSITION_OPERAND, coord[3], n1, *turned)]
        lo, hi = unfold(sig.operands[2].shape, coord, (coord[0] + 1, coord[1] + 1, m1, n1))
        accesses += [broadcast_access(sig, i, lo, hi) for i in ends(sig)]
        for index in range(ends(sig).stop, len(sig.operands)):
            accesses += _repeated_rows(sig, index, coord[2], m1)
        out_box = ((coord[2], coord[3]), (m1, n1))
        accesses.append(Access(2, *self._batched(sig, 2, coord, out_box), write=True))
        return accesses

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
        rows, columns = sig.read(MatmulParams).tile
        if machine.cooperative:
            if matmul_small.served(sig, machine):
                return matmul_small.scratch(sig, machine)
            form = served(sig, machine)
            return scratch(sig, form, machine) if form else staged(sig, machine)
        return 4 * rows * columns

    def rounds(self, sig: Signature, machine: Machine) -> int:
        form = served(sig, machine)
        return passes(sig, form, machine) * rounds_of_sums(sig, form, machine) if form else 1

    def cost(self, sig: Signature, coord: Sequence[int]) -> tuple[float, float]:
        _, _, k = dims(sig)
        rows, columns = sig.read(MatmulParams).tile
        many = len(tiles(sig, coord))
        moved = super().cost(sig, coord)[1]
        if rotates(sig):
            # The accesses to the results cover whole caches, although a task writes only the rows
            # of its tile. So the bytes of the results are computed from the size of the tile.
            read = [a for a in self.accesses(sig, coord) if a.operand < 2]
            moved = float(rows * columns * many * sig.operands[2].itemsize + bytes_of(sig, read))
        if sig.read(MatmulParams).pixels is not None:
            # The accesses cover whole images, of which a part of k reads some pixels.
            loaded = (rows + columns) * min(part_of_k(sig), k) * sig.operands[0].itemsize
            moved = float((loaded + rows * columns * sig.operands[2].itemsize) * many)
        return 2.0 * rows * columns * min(part_of_k(sig), k) * many, moved

    def texts(self, sig: Signature) -> tuple[str, ...]:
        return page_texts(sig, POSITION_OPERAND) if rotates(sig) else ()

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        if row_type(sig.operands[1]) is not None:
            raise PlanError(
                f"{machine.name} has no device function for products with weights of "
                f"{sig.operands[1].dtype} under the variant {machine.variant.name!r}; plan again "
                "for this machine"
            )
        return write(name, sig, machine)


def _check_types(sig: Signature) -> None:
    """Raises PlanError unless both operands are floats, or both int8, whose sums are int32."""
    params = sig.read(MatmulParams)
    whole = sums_of(sig) == "int32"
    rows = row_type(sig.operands[1])
    if rows is not None:
        check_rows(sig.operands[1])
        typed(sig, 0, rows.values.name)
        need(
            (params.transpose_a, params.transpose_b) == (False, True)
            and not params.windows
            and served_codes(rows),
            f"no device function multiplies by {sig.operands[1].dtype} in this form; expected "
            "transpose_b alone, rows of a multiple of 64 elements, and groups of a multiple of 16",
        )
    for index in (0, 1) if rows is None else (0,):
        typed(sig, index, *(("int8",) if whole else text.FLOATS))
    plain = params.expr is None
    typed(sig, 2, *(("int32",) if whole and plain else text.FLOATS))
    need(not whole or not paired(sig), "a gated or rotated product needs floating-point operands")
    need(
        not params.tf32 or all(sig.operands[i].dtype == "fp32" for i in (0, 1)),
        "tf32 needs fp32 operands",
    )


def _check_halves(sig: Signature, columns: int) -> None:
    """Raises PlanError unless the columns of the product are whole heads that can be rotated by
    halves, and each head is in one tile.
    """
    params = sig.read(MatmulParams)
    width, tables = params.rotary, range(ends(sig).stop, len(sig.operands))
    need(
        len(sig.operands) >= 5
        and len(sig.operands[2].shape) == 2
        and not (params.gated or params.windows or rotates(sig)),
        "a product with rotated halves needs one matrix, cosines and sines, and no gate, no "
        "windows and no caches",
    )
    need(
        width % 2 == columns % width == params.tile[1] % width == 0,
        f"the head size {width} must be even and divide the {columns} columns and the tile's "
        f"{params.tile[1]} columns",
    )
    rows = {matrix(sig, i) for i in tables}
    need(
        len(rows) == 1 and next(iter(rows))[1] == width // 2,
        f"the cosines and sines have shapes {sorted(rows)}; both must have the shape "
        f"(rows, {width // 2})",
    )
    for index in tables:
        typed(sig, index, *text.FLOATS)


def _repeated_rows(sig: Signature, index: int, m0: int, m1: int) -> list[Access]:
    """The accesses to an operand whose rows are repeated along the product's rows: row m of the
    product reads row m modulo the operand's number of rows. m0, m1: the range of the product's
    rows.
    """
    rows, columns = sig.operands[index].shape
    lo, hi = m0 % rows, (m1 - 1) % rows + 1
    parts = ((lo, hi),) if lo < hi else ((0, hi), (lo, rows))
    if m1 - m0 >= rows:
        parts = ((0, rows),)
    return [Access(index, (a, 0), (b, columns)) for a, b in parts]


def _check_splits(sig: Signature, k: int) -> None:
    params = sig.read(MatmulParams)
    splits, out = params.splits, sig.operands[2]
    if splits == 1:
        return
    need(
        len(out.shape) == 3
        and out.shape[0] == splits
        and out.dtype == sums_of(sig)
        and params.expr is None
        and max(len(side_shape(sig, i)) for i in (0, 1)) == 2,
        f"{splits} parts of k need an output of {splits} matrices of sums, got {list(out.shape)}",
    )
    need(
        (splits - 1) * part_of_k(sig) < k,
        f"k={k} is too short for {splits} parts",
    )


register(Matmul())
