"""Writes C++ text that applies a product's epilogue to neighbouring results of one thread and
stores them with one vector access. Called by the writers of vendors' device functions for products.
"""

from __future__ import annotations

import math

from ark.plan.kind import Signature
from ark.tasks import expression, text
from ark.tasks.matmul_form import POSITION_OPERAND, dims, paired, place_names, rotates, sums_of
from ark.tasks.matmul_params import MatmulParams
from ark.tasks.matmul_text import finish, outputs
from ark.tasks.rotary import rope

VECTOR_ELEMENTS = 8  # neighbouring results per call


def packed(sig: Signature, width: int) -> list[int] | None:
    """The indices of the output and of the epilogue's operands that are accessed in vectors of
    `width` elements; None if rows of one of them may not be aligned to a vector.
    """
    indices = []
    for i in range(2, len(sig.operands)):
        shape, strides = text.pad4(sig.operands[i].shape, 1), text.pad4(sig.operands[i].strides, 0)
        if shape[3] == 1:
            continue
        if any(n > 1 and s % width for n, s in zip(shape[:3], strides[:3], strict=True)):
            return None
        indices.append(i)
    return indices


def residual(sig: Signature) -> int | None:
    """The index of the epilogue's only operand that has as many elements as the output (a residual)
    and can be read in vectors; None if there is none or more than one.
    """
    params, out = sig.read(MatmulParams), sig.operands[2].shape
    if paired(sig) or params.expr is None:
        return None
    side_by_side = packed(sig, VECTOR_ELEMENTS) or []
    whole = [
        i for i in side_by_side if i > 2 and math.prod(sig.operands[i].shape) == math.prod(out)
    ]
    return whole[0] if len(whole) == 1 else None


def ahead(sig: Signature, index: int, row: str, column: str) -> str:
    """The text of a C++ lambda that loads VECTOR_ELEMENTS neighbouring elements of an epilogue
    operand before the sums are complete. The lambda of `several` then uses the loaded elements.
    """
    at = text.offset(sig, index, place_names(sig, "row", "column"))
    return (
        "[&](int at_row, int at_column, bool there) {\n"
        f"    const int row = {row} + at_row, column = {column} + at_column;\n"
        f"    ArkPack<{sig.operands[index].ctype}, {VECTOR_ELEMENTS}> pack = {{}};\n"
        f"    if (there && ark_aligned({text.addresses(sig, [index])})) "
        f"pack = ark_load_pack<{VECTOR_ELEMENTS}>(p{index} + {at});\n"
        "    (void)row; (void)column;\n    return pack;\n  }"
    )


def vector_store(
    sig: Signature, indices: list[int], width: int, loaded_ahead: int | None = None
) -> str:
    """C++ statements that apply the epilogue to `width` neighbouring sums v and store the results
    at a row and column. loaded_ahead: the index of an operand whose elements are already loaded, in
    the variable `pack`.
    """
    names = place_names(sig, "row", "column")
    lines, leaves = [], [("v[j]", "ark_i32" if sums_of(sig) == "int32" else "float")]
    for i in range(3, len(sig.operands)):
        at = text.offset(sig, i, names)
        held = width if i in indices else 1
        source = "pack" if i == loaded_ahead else f"ark_load_pack<{held}>(p{i} + {at})"
        lines.append(f"const auto{'&' if i == loaded_ahead else ''} e{i} = {source};")
        loaded = text.load(sig, i, f"e{i}.v", "j" if held > 1 else "0")
        leaves.append((loaded, text.loaded(sig, i)))
    writer = expression.Writer(leaves, text.literal)
    tree = sig.read(MatmulParams).expr
    rounded = sig.operands[2].dtype in expression.SIXTEEN_BITS
    value, _ = writer.write(expression.leaf(0) if tree is None else tree, rounded)
    lines += [
        f"ArkPack<{sig.operands[2].ctype}, {width}> made;",
        "#pragma unroll",
        f"for (int j = 0; j < {width}; ++j) {{",
        *writer.statements,
        text.store(sig, 2, "made.v", "j", value),
        "}",
        f"ark_store_pack<{width}>(po + {text.offset(sig, 2, names)}, made);",
    ]
    return "".join(f"{'' if line[0] == '#' else '      '}{line}\n" for line in lines)


def several(sig: Signature, row: str, column: str, loaded_ahead: int | None = None) -> str:
    """The text of a C++ lambda that applies the epilogue to VECTOR_ELEMENTS neighbouring sums v and
    stores the results. Only the first `left` sums are valid.

    The lambda's arguments are the position of the first sum in the tile, which begins at `row`,
    `column`. For a product that rotates queries and keys it uses the variable `rope` (see
    `declared`). loaded_ahead: the index of an operand whose elements `ahead` has loaded.
    """
    params = sig.read(MatmulParams)
    if rotates(sig):
        single = "ark_rope_pair(c, rope, row, first + j, v[j], v[j + 1]);\n"
        whole = (
            f"float all[{VECTOR_ELEMENTS}];\n      for (int j = 0; j < {VECTOR_ELEMENTS}; ++j) "
            "all[j] = v[j];\n"
            "      ark_rope_pack(rope, row, first, all);\n"
        )
        heads = (params.head_dim, sig.operands[2].strides[0])
        stored = None if any(n % VECTOR_ELEMENTS for n in heads) else [2, 5, 6]
    elif params.gated:
        single = finish(sig, "ark_swiglu(v[j], v[j + 1])", "row", "(first + j) / 2")
        whole = _gated(sig)
        stored = packed(sig, VECTOR_ELEMENTS // 2)
    else:
        single = "const int column = first + j;\n" + finish(sig, "v[j]", "row", "column")
        stored = packed(sig, VECTOR_ELEMENTS)
        vectors = vector_store(sig, stored or [], VECTOR_ELEMENTS, loaded_ahead)
        whole = f"const int column = first;\n{vectors}"
    step = 2 if paired(sig) else 1
    body = (
        f"#pragma unroll\n      for (int j = 0; j < {VECTOR_ELEMENTS}; j += {step}) {{\n"
        f"      if (j >= left) break;\n      {single}      }}\n"
    )
    _, n, _ = dims(sig)
    across = params.tile[1]
    if stored is not None and (across % VECTOR_ELEMENTS == 0 or n <= across):
        body = (
            f"    if (left == {VECTOR_ELEMENTS} && ark_aligned({text.addresses(sig, stored)})) {{\n"
            f"      {whole}    }} else {{\n{body}    }}\n"
        )
    argument = "" if loaded_ahead is None else ", const auto& pack"
    return (
        f"[&](int at_row, int at_column, const auto* v, int left{argument}) {{\n"
        f"    const int row = {row} + at_row, first = {column} + at_column;\n{body}    }}"
    )


def _gated(sig: Signature) -> str:
    """C++ statements that compute silu(gate) * value for pairs of neighbouring sums and store the
    results side by side.
    """
    half = VECTOR_ELEMENTS // 2
    value = text.store(sig, 2, "made.v", "j", "ark_swiglu(v[2 * j], v[2 * j + 1])")
    start = text.offset(sig, 2, place_names(sig, "row", "first / 2"))
    return (
        f"ArkPack<{sig.operands[2].ctype}, {half}> made;\n#pragma unroll\n"
        f"      for (int j = 0; j < {half}; ++j) {value}\n"
        f"      ark_store_pack<{half}>(po + {start}, made);\n"
    )


def declared(sig: Signature) -> str:
    """Declarations of the variables that `several` uses."""
    lines = f"  const auto rope = {rope(sig, 2, POSITION_OPERAND)};\n" if rotates(sig) else ""
    return outputs(sig) + lines
