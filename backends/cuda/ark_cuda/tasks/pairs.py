"""Emits the source that applies a product's epilogue expression in the registers of the sums, to
two neighbouring columns at a time (pairs.h).

Operands with a single row, such as a bias, are read at a lane's pairs of columns. One operand may
have all of the result's elements, such as a residual. Called by the writer of products for
warpgroups.
"""

from __future__ import annotations

from dataclasses import dataclass

from ark.plan.kind import OperandType, Signature
from ark.tasks import expression, text
from ark.tasks import matmul_vectors as vectors
from ark.tasks.matmul_form import dims, paired, place_names, sums_of
from ark.tasks.matmul_params import MatmulParams
from ark_cuda.tasks.wgmma import HALVES

TYPES = (*HALVES, "fp32")
MAX_HELD_REGISTERS = 32  # registers for 64 columns of the operands with a single row
# The loop that stores a tile is unrolled MOST_ROUNDS times if the expression has at most
# MOST_UNROLLED nodes.
MOST_UNROLLED, MOST_ROUNDS = 8, 4
PAIRS_IN_64_COLUMNS = 8  # pairs of a lane in 64 columns
MIN_TILE_COLUMNS = 32


@dataclass(frozen=True)
class Store:
    """The source that stores a tile's results. prepared: the statements that run before a tile's
    sums are complete. stored: the statements that store the results if the C++ condition `aligned`
    is true ("" if it always is).
    """

    prepared: str
    stored: str
    aligned: str


def store(sig: Signature, wide: int) -> Store | None:
    """The source with which a warpgroup stores its `wide` columns of a tile, or None if the
    expression cannot be computed for pairs of columns.
    """
    params, out = sig.read(MatmulParams), sig.operands[2]
    m, n, _ = dims(sig)
    stored = None if paired(sig) else vectors.packed(sig, vectors.VECTOR_ELEMENTS)
    if (
        params.expr is None
        or out.dtype not in TYPES
        or stored is None
        or n % vectors.VECTOR_ELEMENTS
    ):
        return None
    rest = vectors.residual(sig)
    beside = [i for i in stored if i not in (2, rest)]
    if rest is not None and (sig.operands[rest].dtype in HALVES) != (out.dtype in HALVES):
        return None
    if rest is not None and sig.operands[rest].dtype not in TYPES:
        return None
    if any(text.pad4(sig.operands[i].shape, 1)[2] > 1 for i in beside):
        return None
    if (
        sum(sig.operands[i].itemsize * 2 * PAIRS_IN_64_COLUMNS // 4 for i in beside)
        > MAX_HELD_REGISTERS
    ):
        return None
    bits = text.addresses(sig, stored)
    start = text.offset(sig, 2, place_names(sig, "m0", "left0"))
    place = f"top, {m} - m0, {n} - left0"
    some = _stored_columns(wide, out)
    shape = f"{some}, {str(rest is not None).lower()}"
    rounds = MOST_ROUNDS if expression.written_size(params.expr) <= MOST_UNROLLED else 1
    prepared = (
        f"  const bool fits = ark_aligned({bits});\n"
        f"  const auto beside = {_beside(sig, beside, wide, some)};\n"
        f"  const auto ahead = {_ahead(sig, rest)};\n"
        f"  const auto aside = ark_matrix_aside<{out.ctype}, {shape}>(\n"
        f"      top, 0, {m} - m0, {n} - left0, beside, ahead);\n"
    )
    call = (
        f"  const auto two = {_two(sig, beside, rest)};\n"
        f"  ark_matrix_pairs<{wide}, {shape}, {rounds}>(\n"
        f"      c, d, po + {start}, {out.strides[-2]}, {place}, aside, beside, ahead, two);\n"
    )
    return Store(prepared, call, "" if bits == "0u" else "fits")


def tile_columns(sig: Signature) -> int:
    """The number of columns that a tile's matrix instructions compute. It may be more than the
    tile's columns.
    """
    columns: int = sig.read(MatmulParams).tile[1]
    return MIN_TILE_COLUMNS if columns == dims(sig)[1] < MIN_TILE_COLUMNS else columns


def _stored_columns(wide: int, out: OperandType) -> int:
    """The number of columns that are stored at a time. The last ones may be past the tile's end."""
    if out.dtype not in HALVES:
        return min(wide, 32)
    return wide if wide < 64 else 48 if wide % 64 and wide % 48 == 0 else 64


def _beside(sig: Signature, operands: list[int], wide: int, some: int) -> str:
    """The text of a lambda that loads, from operands with a single row (such as a bias), the pairs
    of elements for a lane's columns.
    """
    _, n, _ = dims(sig)
    blocks = some // 8
    fields = "".join(f" decltype(ark_held<2>(p{i})) e{i}[{blocks}];" for i in operands)
    whole = n % tile_columns(sig) == 0 and wide % some == 0
    column = "left0 + at_column + 8 * j"
    if not whole:
        column = f"{column} < {n} ? {column} : {n - 2}"
    names = place_names(sig, "m0", "column")
    loads = "".join(
        f"      ark_hold(made.e{i}[j], p{i} + {text.offset(sig, i, names)});\n" for i in operands
    )
    if not operands:
        return "[](int) { return ArkNothing{}; }"
    return (
        f"[=](int at_column) {{\n    struct Beside {{{fields} }};\n    Beside made = {{}};\n"
        f"#pragma unroll\n    for (int j = 0; fits && j < {blocks}; ++j) {{\n"
        f"      const int column = {column};\n{loads}    }}\n    return made;\n  }}"
    )


def _ahead(sig: Signature, rest: int | None) -> str:
    """The text of a lambda that loads 16 bytes of the residual (operand `rest`), or two elements if
    these have 32 bits, as 32-bit words.
    """
    if rest is None:
        return "ArkNothing{}"
    at = text.offset(sig, rest, place_names(sig, "row", "column"))
    words = 4 if sig.operands[rest].dtype in HALVES else 2
    return (
        "[=](int at_row, int at_column, bool there) {\n"
        "    const int row = m0 + at_row, column = left0 + at_column;\n"
        f"    ArkPack<ark_u32, {words}> pack = {{}};\n    if (there && fits) "
        f"pack = ark_load_pack<{words}>(reinterpret_cast<const ark_u32*>(p{rest} + {at}));\n"
        "    (void)row; (void)column;\n    return pack;\n  }"
    )


def _two(sig: Signature, beside: list[int], rest: int | None) -> str:
    """The text of a lambda that applies the expression to two neighbouring sums."""
    names = place_names(sig, "row", "0")
    lines, leaves = [], [("v[k]", "ark_i32" if sums_of(sig) == "int32" else "float")]
    for i in range(3, len(sig.operands)):
        ctype = sig.operands[i].ctype
        if i == rest and sig.operands[i].dtype in HALVES:
            lines.append(f"ArkWords<{ctype}, 2> held;")
            lines.append("held.words.v[0] = rest[0];")
            lines.append(f"const auto e{i} = ark_unpacked(held);")
        elif i == rest:
            values = "{ark_bits_float(rest[0]), ark_bits_float(rest[1])}"
            lines.append(f"const ArkPack<float, 2> e{i}{{{values}}};")
        elif i in beside:
            lines.append(f"const auto e{i} = ark_unpacked(held_beside.e{i}[i]);")
        else:
            lines.append(
                f"const auto e{i} = ark_load_pack<1>(p{i} + {text.offset(sig, i, names)});"
            )
        place = "k" if i == rest or i in beside else "0"
        leaves.append((text.load(sig, i, f"e{i}.v", place), text.loaded(sig, i)))
    writer = expression.Writer(leaves, text.literal)
    tree = sig.read(MatmulParams).expr
    rounded = sig.operands[2].dtype in expression.SIXTEEN_BITS
    value, _ = writer.write(expression.leaf(0) if tree is None else tree, rounded)
    body = "".join(f"    {line}\n" for line in lines)
    each = "".join(f"      {line}\n" for line in writer.statements)
    return (
        "[&](int at_row, const auto* v, const auto& held_beside, int i, const ark_u32* rest,\n"
        "      float (&made)[2]) {\n    const int row = m0 + at_row;\n"
        f"    (void)row; (void)held_beside; (void)i; (void)rest;\n{body}"
        f"#pragma unroll\n    for (int k = 0; k < 2; ++k) {{\n{each}"
        f"      made[k] = static_cast<float>({value});\n    }}\n  }}"
    )
