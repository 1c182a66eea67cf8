"""The task kind `row_values`, which dequantises rows of a matrix, for products that cannot multiply
by quantised weights directly. Emitted by ark.lower.ops.quantize.

operands: quantised rows (n, k) of a RowType, values (n, k) of floats.

coord: the first row and the row after the last. quantized_linear_rows.h reads rows; row_values.h
has the device function.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.ir.dtype import RowType, by_name
from ark.machine import Machine
from ark.plan.kind import Access, OperandType, Signature, TaskKind, register
from ark.plan.params import Places, count, is_dense, need, shaped
from ark.tasks import text

HEADER = text.header("quantized_linear_rows.h")


def check_rows(operand: OperandType) -> tuple[int, int]:
    """The sizes of a quantised matrix; raises PlanError for any other operand."""
    need(
        isinstance(by_name(operand.dtype), RowType) and len(operand.shape) == 2,
        f"operand {operand.dtype} {list(operand.shape)} is not a quantised matrix",
    )
    need(
        operand.shape[1] == operand.per_item,
        f"the matrix has {operand.shape[1]} columns, but rows of {operand.dtype} have "
        f"{operand.per_item}",
    )
    need(is_dense(operand), "the rows are strided, expected dense")
    return operand.shape[0], operand.shape[1]


def bytes_of(sig: Signature, index: int) -> str:
    """The C++ text of a byte pointer to an operand. A typed pointer cannot be passed to macros,
    because the name of a RowType contains commas.
    """
    return f"ARK_POINTER(const unsigned char, {text.address(sig, index)})"


class RowValues(TaskKind):
    name = "row_values"
    headers = (HEADER, text.header("row_values.h"))

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2)
        shaped(sig, 1, check_rows(sig.operands[0]))
        need(
            sig.operands[1].strides[1] == 1,
            "columns of the result are strided, expected contiguous",
        )

    def places(self, sig: Signature) -> Places:
        return Places((range(0, sig.operands[0].shape[0]),), span=True)

    def wide(self, sig: Signature) -> frozenset[int]:
        return frozenset({0})

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        (first, last), k = coord, sig.operands[0].shape[1]
        return [Access(i, (first, 0), (last, k), write=i == 1) for i in range(2)]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        constants = (sig.operands[0].ctype, sig.operands[1].strides[0])
        operands = (bytes_of(sig, 0), text.pointer(sig, 1, const=False))
        return text.call(name, "ark_row_values", constants, operands)


register(RowValues())
