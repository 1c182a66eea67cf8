"""Tiles of products of fp32 in fp32's digits, by ordinary instructions with both sides in shared
memory (exact.h); any transposes, batches, ragged edges and epilogues. Called by
ark_cuda.tasks.matmul.
"""

from __future__ import annotations

from dataclasses import dataclass

from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.matmul_form import along_k, deal, dims, paired, place_names, side_strides
from ark.tasks.matmul_text import finish, outputs
from ark_cuda.tasks import packs

LEAST_WORK = 1 << 24  # multiplications that are worth filling stages
LEAST_ROWS, LEAST_COLUMNS, LEAST_DEPTH = 9, 32, 16
MOST_THREADS = 512  # of whom each may have 128 registers
PACK = 4  # neighbouring results of a thread
EXCHANGED = 8  # sums of a thread that slices exchange at a time


@dataclass(frozen=True)
class _Form:
    """Rows and columns of a tile, rows of a thread, elements of k in a stage, stages."""

    rows: int
    columns: int
    thread_rows: int
    depth: int
    stages: int


def _form(sig: Signature, machine: Machine) -> _Form | None:
    """How the block computes the signature's tiles; None where this body does not serve them."""
    if any(o.dtype != "fp32" or o.packet for o in sig.operands[:2]) or sig.operands[2].packet:
        return None
    if sig.params.get("splits", 1) > 1 or sig.params.get("windows") or paired(sig):
        return None
    m, n, k = dims(sig)
    rows, columns = sig.params["tile"]
    if rows < LEAST_ROWS or columns < LEAST_COLUMNS or k < LEAST_DEPTH:
        return None
    threads = machine.warps * machine.lanes
    if threads > MOST_THREADS or threads & (threads - 1) or m * n * k < LEAST_WORK:
        return None
    high, wide = (max(32, 1 << (size - 1).bit_length()) for size in (rows, columns))
    thread_rows = 8 if high > 32 else 4
    if high == wide == 32:
        wide = 64
    units = high // thread_rows * (wide // 8)
    if units > threads or machine.variant.name != "block" or not machine.has("mma_sync"):
        return None
    slices = threads // units
    room = machine.shared_bytes - machine.ring_bytes
    for depth in dict.fromkeys((min(64, 8 * max(2, slices)), 16, 8)):
        stage = 4 * depth * (high + wide + 8)
        stages = min(4, room // stage)
        if depth % slices == 0 and (stages > 2 or (stages == 2 and depth <= 16)):
            made = _Form(high, wide, thread_rows, depth, stages)
            return made if _nbytes(made, slices, threads) <= room else None
    return None


def _nbytes(form: _Form, slices: int, threads: int) -> int:
    """Shared memory: the stages, and when they have been used what slices exchange."""
    stage = 4 * form.depth * (form.rows + form.columns + 8)
    return max(form.stages * stage, 4 * threads * EXCHANGED if slices > 1 else 0)


def scratch(sig: Signature, machine: Machine) -> int:
    """Shared memory, in bytes; 0 where this body does not serve."""
    form = _form(sig, machine)
    if form is None:
        return 0
    threads = machine.warps * machine.lanes
    slices = threads // (form.rows // form.thread_rows * (form.columns // 8))
    return _nbytes(form, slices, threads)


def write(name: str, sig: Signature, machine: Machine) -> str | None:
    """The body, or None where it does not serve."""
    form = _form(sig, machine)
    if form is None:
        return None
    constants = (form.rows, form.columns, form.thread_rows, form.depth, form.stages)
    body = (
        _side(sig, 0, "a", "m0", form.rows)
        + _side(sig, 1, "b", "n0", form.columns)
        + f"  ark_exact_tile<{', '.join(map(str, constants))}>(ARK_SCRATCH(c), a, b, "
        + f"[&](int at_row, int at_column, const float (&v)[{PACK}]) {{\n{_store(sig)}  }});\n"
    )
    declared = text.operand(sig, 0, "p0") + text.operand(sig, 1, "p1") + outputs(sig)
    tiles = (
        f"  ark_each_tile<{deal(sig)}, true>(t, [&](int i0, int i1, int m0, int n0) {{\n"
        f"  (void)i0; (void)i1;\n{body}  return true;\n  }});\n"
    )
    return text.function(name, declared + tiles)


def _side(sig: Signature, index: int, name: str, first: str, high: int) -> str:
    """Declares a side of the tile that begins at the row, or column, `first`."""
    total, tile, k = dims(sig)[index], int(sig.params["tile"][index]), dims(sig)[2]
    row, deep = side_strides(sig, index)
    whole = tile == high and total % tile == 0
    flags = (along_k(sig, index), whole)
    listed = ", ".join(str(c).lower() for c in (high, k, row, deep, *flags))
    start = text.offset(sig, index, place_names(sig, "0", "0"))
    left = f"{total} - {first}"
    there = f"{tile}" if total % tile == 0 else f"({left} < {tile} ? {left} : {tile})"
    return (
        f"  const ArkExactSide<{listed}> {name}"
        f"{{p{index} + {start} + static_cast<ark_i64>({first}) * {row}, {there}}};\n"
    )


def _store(sig: Signature) -> str:
    """Stores four neighbouring sums, or what the expression makes of them."""
    single = finish(sig, "v[j]", "row", "column + j")
    body = (
        f"#pragma unroll\n      for (int j = 0; j < {PACK}; ++j) {{\n"
        f"      if (at_column + j >= b.rows) break;\n{single}      }}\n"
    )
    found = packs.packed(sig, PACK)
    _, n, _ = dims(sig)
    columns = int(sig.params["tile"][1])
    if found is not None and (columns % PACK == 0 or n <= columns):
        addresses = text.addresses(sig, found)
        body = (
            f"    if (at_column + {PACK} <= b.rows && ark_aligned({addresses})) {{\n"
            f"{packs.together(sig, found, PACK)}    }} else {{\n{body}    }}\n"
        )
    return (
        "    if (at_row >= a.rows || at_column >= b.rows) return;\n"
        f"    const int row = m0 + at_row, column = n0 + at_column;\n{body}"
    )
