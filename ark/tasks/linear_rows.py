"""The task kind `linear_rows`: linear layers of few rows with quantised weights. It equals the kind
`linear` (ark.tasks.linear), except that w (n, k) has a RowType, which stores codes and scales. A
stage holds whole rows; each row is dequantised when it is multiplied.
"""

from __future__ import annotations

from ark.machine import Machine
from ark.plan.kind import Signature, register
from ark.plan.params import need
from ark.tasks import text
from ark.tasks.linear import Linear, check_batch, epilogue, prologue, summed
from ark.tasks.linear_form import LinearParams
from ark.tasks.row_values import HEADER, check_rows


class LinearRows(Linear):
    name = "linear_rows"
    common_headers = (*Linear.common_headers, text.header("linear_rows.h"))
    headers = (*Linear.headers, HEADER)

    def check(self, sig: Signature) -> None:
        super().check(sig)
        need(sig.read(LinearParams).split_k == 1, "split_k must be 1 for quantised weights")

    def weight(self, sig: Signature) -> tuple[int, int]:
        return check_rows(sig.operands[1])

    def wide(self, sig: Signature) -> frozenset[int]:
        return super().wide(sig) | {1}

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        check_batch(name, sig, machine)
        m, k = sig.operands[2].shape[0], sig.operands[0].shape[1]
        constants = (sig.operands[1].ctype, m, k, sig.read(LinearParams).rows)
        operands = (summed(sig, 0), prologue(sig), epilogue(sig))
        return text.call(name, "ark_linear_rows", constants, operands)


register(LinearRows())
