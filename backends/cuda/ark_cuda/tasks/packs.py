"""Neighbouring results of a product, as source: computed together and stored by one access.

Called by the writers of CUDA's bodies for products.
"""

from __future__ import annotations

from ark.plan.kind import Signature
from ark.tasks import expression, text
from ark.tasks.matmul_form import place_names, sums_of


def packed(sig: Signature, width: int) -> list[int] | None:
    """The output and the operands behind it that have `width` elements side by side; None where
    these do not always lie at multiples of 16 bytes.
    """
    found = []
    for i in range(2, len(sig.operands)):
        shape, strides = text.pad4(sig.operands[i].shape, 1), text.pad4(sig.operands[i].strides, 0)
        if shape[3] == 1:
            continue
        if any(n > 1 and s % width for n, s in zip(shape[:3], strides[:3], strict=True)):
            return None
        found.append(i)
    return found


def together(sig: Signature, found: list[int], width: int) -> str:
    """Statements that compute and store `width` neighbouring results, of the sums v, at a row and
    column.
    """
    names = place_names(sig, "row", "column")
    lines, leaves = [], [("v[j]", "ark_i32" if sums_of(sig) == "int32" else "float")]
    for i in range(3, len(sig.operands)):
        at = text.offset(sig, i, names)
        held = width if i in found else 1
        lines.append(f"const auto e{i} = ark_load_pack<{held}>(p{i} + {at});")
        loaded = text.load(sig, i, f"e{i}.v", "j" if held > 1 else "0")
        leaves.append((loaded, text.loaded(sig, i)))
    writer = expression.Writer(leaves, text.literal)
    tree = sig.params.get("expr")
    value, _ = writer.write(expression.leaf(0) if tree is None else tree)
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
