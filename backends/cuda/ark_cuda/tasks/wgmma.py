"""The wgmma instructions of warpgroups (sm_90a): the types that they support, and their source
text, which lists each register of the sums.

Called by the writers of products and of attention.
"""

from __future__ import annotations

from ark.ir.dtype import SMALL_FLOATS
from ark.plan.kind import OperandType

HALVES = {"bf16": "bf16", "fp16": "f16"}  # types for which k need not be contiguous
BYTES = {t.name: t.name.removeprefix("fp8_") for t in SMALL_FLOATS}
# The names of element types in PTX instructions. Products of fp32 operands are computed in tf32.
KINDS = {**HALVES, **BYTES, "int8": "s8", "fp32": "tf32"}


def sum_of(side: OperandType) -> str:
    """The C++ type of the sums if both operands have the element type of `side`."""
    return "ark_i32" if side.dtype == "int8" else "float"


def multiply(
    columns: int, sides: tuple[OperandType, OperandType], transposes: tuple[int, int]
) -> str:
    """The C++ definition of one wgmma instruction: 64 rows, `columns` columns, 32 bytes along k.
    sides: the operands. transposes: for each operand 1 if k is not contiguous in it, else 0.
    """
    count = columns // 2
    left, right = sides
    total = sum_of(left)
    whole = total == "ark_i32"
    kinds = KINDS[left.dtype], KINDS[right.dtype]
    form = f"m64n{columns}k{32 // left.itemsize}.{'s32' if whole else 'f32'}.{'.'.join(kinds)}"
    # The immediate arguments of wgmma for the types that have them: the sign of each operand, and
    # whether it is transposed.
    more = "" if whole else ", 1, 1"
    if left.dtype in HALVES:
        more += f", {transposes[0]}, {transposes[1]}"
    across = (str(bool(t)).lower() for t in transposes)
    types = (str(columns), left.ctype, right.ctype, *across, total)
    operands = (register_list(0, count), *(f"%{count + i}" for i in range(3)))
    words = (
        *types,
        *(f'"{w}"' for w in (form, *operands, more)),
        sums(count, "r" if whole else "f"),
    )
    name = f"{columns}_{'_'.join(kinds)}_{transposes[0]}{transposes[1]}"
    return once(f"ARK_WGMMA_{name}", f"ARK_WGMMA({', '.join(words)})")


def register_list(first: int, count: int) -> str:
    """The registers in an instruction's text: the references %first, %(first + 1), ... to operands
    of the asm statement.
    """
    return ", ".join(f"%{first + i}" for i in range(count))


def sums(count: int, kind: str) -> str:
    """The asm operands d[0], d[1], ..., read and written, with the constraint "f" or "r"."""
    return ", ".join(f'"+{kind}"(d[{i}])' for i in range(count))


def once(guard: str, text: str) -> str:
    """The text, guarded by the macro `guard`, because several bodies of a kernel may define the
    same instruction.
    """
    return f"#ifndef {guard}\n#define {guard}\n{text}\n#endif\n"
