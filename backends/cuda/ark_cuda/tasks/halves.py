"""Emits the source that rotates heads by halves (rotary embedding) in the registers that hold a
product's sums (halves.h). Called by the writer of products for warpgroups.
"""

from __future__ import annotations

from ark.plan.kind import Signature
from ark.tasks import matmul_vectors as vectors
from ark.tasks import text
from ark.tasks.matmul_form import by_halves, dims, ends, place_names
from ark.tasks.matmul_params import MatmulParams
from ark.tasks.matmul_text import ended
from ark_cuda.tasks.pairs import Store
from ark_cuda.tasks.wgmma import HALVES

STEP_COLUMNS = 64  # of a head that are rotated at a time: ArkTurn::BLOCKS of each half


def serves(sig: Signature, wide: int) -> bool:
    """True if a warpgroup that stores `wide` columns of a tile can rotate the heads in these
    columns.
    """
    width = sig.read(MatmulParams).rotary
    stored = (sig.operands[i] for i in (2, *_tables(sig)))
    return (
        all(o.dtype in HALVES for o in stored)
        and all(sig.operands[i].strides[-1] == 1 for i in _tables(sig))
        and width % STEP_COLUMNS == wide % width == 0
    )


def _tables(sig: Signature) -> tuple[int, int]:
    """The indices of the operands with the cosines and the sines."""
    return ends(sig).stop, ends(sig).stop + 1


def store(sig: Signature, wide: int) -> Store | None:
    """The source with which a warpgroup stores its `wide` columns of a tile; None if the product
    does not rotate heads by halves.
    """
    if not by_halves(sig):
        return None
    width, (m, n, _) = sig.read(MatmulParams).rotary, dims(sig)
    tables = [sig.operands[i] for i in _tables(sig)]
    pitches = [o.strides[-2] for o in tables]
    bits = text.addresses(sig, _tables(sig)) if all(p % 2 == 0 for p in pitches) else "1u"
    constants = ", ".join(map(str, pitches))
    addresses = ", ".join(f"p{i}" for i in _tables(sig))
    prepared = (
        f"  const bool fits = ark_aligned({bits});\n"
        "  const auto table_row = [=](int high) {\n"
        "    const int row = m0 + top + ark_lane() / 4 + 8 * high;\n"
        f"    return (row < {m} ? row : {m - 1}) % {tables[0].shape[0]};\n  }};\n"
        "  const auto turned = [=](int from) {\n"
        f"    return ark_matrix_turn<{constants}>({addresses}, fits, table_row, from);\n  }};\n"
        "  const auto turn = turned(0);\n"
    )
    pitch = sig.operands[2].strides[-2]
    whole = text.addresses(sig, [2]) if pitch % vectors.VECTOR_ELEMENTS == 0 else "1u"
    start = text.offset(sig, 2, place_names(sig, "m0", "left0"))
    stored = (
        f"  const bool whole = ark_aligned({whole});\n"
        f"  const auto own = {_own(sig)};\n"
        f"  ark_matrix_store_halves<{wide}, {width}>(\n"
        f"      c, d, po + {start}, {pitch}, top, {m} - m0, {n} - left0, "
        "whole, turn, turned, own);\n"
    )
    return Store(prepared, stored, "")


def _own(sig: Signature) -> str:
    """The text of a lambda that applies the epilogue expression to two neighbouring sums."""
    if sig.read(MatmulParams).expr is None:
        return "[](int, int, const float*) {}"
    lines, value = ended(sig, "v[k]", "row", "column + k")
    each = "".join(f"      {line}\n" for line in lines)
    return (
        "[&](int at_row, int at_column, float* v) {\n"
        "    const int row = m0 + at_row, column = left0 + at_column;\n    (void)row;\n"
        f"#pragma unroll\n    for (int k = 0; k < 2; ++k) {{\n{each}      v[k] = {value};\n    }}\n"
        "  }"
    )
