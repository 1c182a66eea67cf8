"""Tiles of fp32 products with both operands in shared memory. They support any transposes, batches,
ragged edges and epilogues. Matrix units compute them as tf32, or in full fp32 precision as sums of
products of tf32 numbers (exact_units.h). On machines whose matrix units are not fast enough for
that, ordinary instructions compute full precision (exact.h). Called through the dialect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks import matmul_small, text
from ark.tasks import matmul_vectors as vectors
from ark.tasks.matmul_form import along_k, deal, dims, paired, place_names, side_strides
from ark.tasks.matmul_params import MatmulParams
from ark.tasks.matmul_text import finish, outputs
from ark.tasks.matmul_thin import served
from ark_cuda.tasks.matmul_body import MatmulBody

MIN_MULTIPLICATIONS = 1 << 24  # the fewest multiplications for which stages pay off
LEAST_ROWS, LEAST_COLUMNS, LEAST_DEPTH = 9, 32, 16
MOST_THREADS = 512  # a thread may then have 128 registers
VECTOR_ELEMENTS = 4  # neighbouring results that a thread computes
EXCHANGED_SUMS = 8  # sums of a thread that slices exchange at once
# For each number of tf32 products per fp32 product: the most elements of a tile that one warp
# computes, so that their sums fit in registers.
MAX_WARP_ELEMENTS = {1: 2048, 3: 1024}
UNIT_DEPTHS = (64, 32, 16)  # elements along k in a stage on matrix units
# The last stage may be partly empty, more so if stages are deep. A depth is used only if all stages
# together have at most this many times the elements along k of stages of the smallest depth.
MAX_PADDED_K_RATIO = 1.125
LEAST_STAGES, MOST_STAGES = 4, 8  # number of stages, if shared memory suffices


@dataclass(frozen=True)
class _Form:
    """The sizes of a tile that ordinary instructions compute: its rows and columns, the number of
    its rows that a thread computes, the elements along k in a stage, and the number of stages.
    """

    rows: int
    columns: int
    thread_rows: int
    depth: int
    stages: int

    def nbytes(self, threads: int) -> int:
        """Shared memory for the stages. If there are more threads than parts of the tile, several
        threads (slices) compute the same part over different k, and exchange sums through this
        memory after the last stage.
        """
        stage = 4 * self.depth * (self.rows + self.columns + 8)
        units = self.rows // self.thread_rows * (self.columns // 8)
        return max(self.stages * stage, 4 * threads * EXCHANGED_SUMS if units < threads else 0)


@dataclass(frozen=True)
class _Units:
    """The sizes of a tile that matrix units compute: rows and columns of the tile and of a warp's
    part of it, tf32 products per fp32 product, elements along k in a stage, and the number of
    stages.
    """

    rows: int
    columns: int
    warp_rows: int
    warp_columns: int
    terms: int
    depth: int
    stages: int


def _form(sig: Signature, machine: Machine) -> _Form | _Units | None:
    """How a block computes the signature's tiles; None if neither matrix units nor ordinary
    instructions support them here.
    """
    params = sig.read(MatmulParams)
    if any(o.dtype != "fp32" or o.packet for o in sig.operands[:2]) or sig.operands[2].packet:
        return None
    if params.splits > 1 or params.reads_images or paired(sig):
        return None
    if served(sig, machine) or matmul_small.served(sig, machine):
        return None
    m, n, k = dims(sig)
    rows, columns = params.tile
    if rows < LEAST_ROWS or columns < LEAST_COLUMNS or k < LEAST_DEPTH:
        return None
    threads = machine.warps * machine.lanes
    work = math.prod(sig.operands[2].shape[:-2]) * m * n * k
    if threads > MOST_THREADS or threads & (threads - 1) or work < MIN_MULTIPLICATIONS:
        return None
    if machine.variant.name != "block" or not machine.has(Capability.MMA_SYNC):
        return None
    high, wide = (max(32, 1 << (size - 1).bit_length()) for size in (rows, columns))
    if high == wide == 32:
        wide = 64
    room = machine.task_bytes
    terms = 1 if params.tf32 else 3
    if terms == 1 or machine.has(Capability.FP32_PARTS):
        return _units(sig, (high, wide), terms, machine.warps, room)
    return _ordinary((high, wide), threads, room)


def _ordinary(tile: tuple[int, int], threads: int, room: int) -> _Form | None:
    """How a block computes a tile by ordinary instructions, with as many stages as fit into `room`
    bytes of shared memory. None if too few fit.
    """
    high, wide = tile
    thread_rows = 8 if high > 32 else 4
    units = high // thread_rows * (wide // 8)
    if units > threads:
        return None
    slices = threads // units
    for depth in dict.fromkeys((min(64, 8 * max(2, slices)), 16, 8)):
        stages = min(4, room // (4 * depth * (high + wide + 8)))
        if depth % slices == 0 and (stages > 2 or (stages == 2 and depth <= 16)):
            form = _Form(high, wide, thread_rows, depth, stages)
            return form if form.nbytes(threads) <= room else None
    return None


def _units(
    sig: Signature, tile: tuple[int, int], terms: int, warps: int, room: int
) -> _Units | None:
    """How a block computes a tile on matrix units; None if `room` bytes of shared memory are too
    few. The tile is divided among warps into parts that are as square as possible.
    """
    high, wide = tile
    parts = [
        (high // down, wide // (warps // down))
        for down in (1 << i for i in range(warps.bit_length()))
        if high % (16 * down) == 0 and wide % (8 * (warps // down)) == 0
    ]
    parts = [p for p in parts if p[0] * p[1] <= MAX_WARP_ELEMENTS[terms]]
    if not parts:
        return None
    warp_rows, warp_columns = min(parts, key=lambda p: (p[0] + p[1], p[0]))
    k = dims(sig)[2]
    least = -(-k // UNIT_DEPTHS[-1]) * UNIT_DEPTHS[-1]
    for depth in (d for d in UNIT_DEPTHS if -(-k // d) * d <= MAX_PADDED_K_RATIO * least):
        stages = min(MOST_STAGES, room // _stage(sig, tile, depth))
        if stages >= LEAST_STAGES or (stages > 1 and depth == UNIT_DEPTHS[-1]):
            return _Units(high, wide, warp_rows, warp_columns, terms, depth, stages)
    return None


def _stage(sig: Signature, tile: tuple[int, int], depth: int) -> int:
    """Bytes of a stage (`depth` elements of k of both operands) in shared memory, with rows padded
    as by ArkUnitSide.
    """
    return 4 * sum(
        tile[i] * (depth + 8) if along_k(sig, i) else depth * (tile[i] + 4) for i in (0, 1)
    )


def _units_text(sig: Signature, form: _Units) -> str:
    """The source that computes a tile on matrix units. It contains a function that computes one
    element of the tile again, without matrix units.
    """
    constants = (
        *(form.rows, form.columns, form.warp_rows, form.warp_columns),
        *(form.terms, form.depth, form.stages),
    )
    (row, a_step), (column, b_step) = side_strides(sig, 0), side_strides(sig, 1)
    reused = (
        f"  const auto again = [&](int row, int column) {{\n"
        f"    return ark_unit_again(a.at + row * ark_i64{{{row}}}, {a_step}, "
        f"b.at + column * ark_i64{{{column}}}, {b_step}, {dims(sig)[2]});\n  }};\n"
    )
    return (
        _side(sig, 0, "a", "m0", "ArkUnitSide", (form.rows, form.depth))
        + _side(sig, 1, "b", "n0", "ArkUnitSide", (form.columns, form.depth))
        + reused
        + f"  ark_unit_tile<{', '.join(map(str, constants))}>(ARK_SCRATCH(c), a, b, again, "
        + f"[&](int at_row, int at_column, const float (&v)[{VECTOR_ELEMENTS}]) {{\n"
        + f"{_store(sig)}  }});\n"
    )


def _side(
    sig: Signature, index: int, name: str, first: str, struct: str, sizes: tuple[int, ...]
) -> str:
    """The source that declares an operand (a or b) of the tile's product, as an object of the type
    `struct`. index: 0 for a, 1 for b. name: the object's name. first: the variable with the tile's
    first row (of b: column). sizes: the operand's rows in shared memory, then the last template
    arguments of the struct.
    """
    total, tile, k = dims(sig)[index], int(sig.read(MatmulParams).tile[index]), dims(sig)[2]
    row, deep = side_strides(sig, index)
    whole = tile == sizes[0] and total % tile == 0
    constants = (sizes[0], k, row, deep, along_k(sig, index), whole, *sizes[1:])
    listed = ", ".join(str(c).lower() for c in constants)
    start = text.offset(sig, index, place_names(sig, "0", "0"))
    left = f"{total} - {first}"
    there = f"{tile}" if total % tile == 0 else f"({left} < {tile} ? {left} : {tile})"
    return (
        f"  const {struct}<{listed}> {name}"
        f"{{p{index} + {start} + static_cast<ark_i64>({first}) * {row}, {there}}};\n"
    )


def _store(sig: Signature) -> str:
    """The source that stores four neighbouring sums, or the epilogue's results for them."""
    single = finish(sig, "v[j]", "row", "column + j")
    body = (
        f"#pragma unroll\n      for (int j = 0; j < {VECTOR_ELEMENTS}; ++j) {{\n"
        f"      if (at_column + j >= b.rows) break;\n{single}      }}\n"
    )
    indices = vectors.packed(sig, VECTOR_ELEMENTS)
    _, n, _ = dims(sig)
    columns = int(sig.read(MatmulParams).tile[1])
    if indices is not None and (columns % VECTOR_ELEMENTS == 0 or n <= columns):
        addresses = text.addresses(sig, indices)
        body = (
            f"    if (at_column + {VECTOR_ELEMENTS} <= b.rows && ark_aligned({addresses})) {{\n"
            f"{vectors.vector_store(sig, indices, VECTOR_ELEMENTS)}    }} else {{\n{body}    }}\n"
        )
    return (
        "    if (at_row >= a.rows || at_column >= b.rows) return;\n"
        f"    const int row = m0 + at_row, column = n0 + at_column;\n{body}"
    )


class ExactTiles(MatmulBody):
    """Tiles of fp32 products, on matrix units or by ordinary instructions."""

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return _form(sig, machine) is not None

    def scratch(self, sig: Signature, machine: Machine) -> int:
        form = _form(sig, machine)
        assert form is not None
        if isinstance(form, _Units):
            return form.stages * _stage(sig, (form.rows, form.columns), form.depth)
        return form.nbytes(machine.warps * machine.lanes)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        form = _form(sig, machine)
        assert form is not None
        if isinstance(form, _Units):
            body = _units_text(sig, form)
        else:
            constants = (form.rows, form.columns, form.thread_rows, form.depth, form.stages)
            body = (
                _side(sig, 0, "a", "m0", "ArkExactSide", (form.rows,))
                + _side(sig, 1, "b", "n0", "ArkExactSide", (form.columns,))
                + f"  ark_exact_tile<{', '.join(map(str, constants))}>(ARK_SCRATCH(c), a, b, "
                + f"[&](int at_row, int at_column, const float (&v)[{VECTOR_ELEMENTS}]) "
                + f"{{\n{_store(sig)}  }});\n"
            )
        declared = text.operand(sig, 0, "p0") + text.operand(sig, 1, "p1") + outputs(sig)
        tiles = (
            f"  ark_each_tile<{deal(sig)}, true>(t, [&](int i0, int i1, int m0, int n0) {{\n"
            f"  (void)i0; (void)i1;\n{body}  return true;\n  }});\n"
        )
        return text.function(name, declared + tiles)
