"""Ops on one row whose input may be packets: rmsnorm, and the choice of the largest elements
(top-k). Both bodies begin before their task's waits (Body.enters). packet_rows.h has the device
code. Called by the source writer through the dialect.
"""

from __future__ import annotations

from ark.backend.codegen.body import Body
from ark.machine import Machine
from ark.plan import kind as kinds
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.experts import TopKParams
from ark.tasks.row_norm import RowNormParams
from ark_rocm.tasks.headers import read


class _Row(Body):
    """The base class of the bodies here: an op on one row whose input is packets."""

    enters = True

    def serves(self, sig: Signature, machine: Machine) -> bool:
        able = kinds.get(self.kind).packets(sig)
        return machine.variant.name == "block" and sig.operands[0].packet and 0 in able

    def headers(self, machine: Machine) -> tuple[str, ...]:
        return read("held_rows.h", "packet_rows.h")


class Norm(_Row):
    """rmsnorm of one row."""

    kind = "row_norm"

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return 8 * machine.warps

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        operands = [text.given(sig, i, const=i != 2) for i in range(3)]
        arguments = (*operands, text.literal(sig.read(RowNormParams).eps))
        call = text.called("ark_packet_rmsnorm", (sig.operands[0].shape[1],), arguments)
        return f"ARK_BODY bool {name}(ArkCtx& c, const ArkTask& t) {{\n  return {call};\n}}\n"


class TopK(_Row):
    """Top-k: the choice of the largest elements of one row."""

    kind = "topk"

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(TopKParams)
        softmax = 2 if params.row_softmax else int(params.softmax)
        sizes = (sig.operands[0].shape[1], params.k, softmax)
        operands = [text.given(sig, i, const=i == 0) for i in range(3)]
        call = text.called("ark_packet_topk", sizes, operands)
        return f"ARK_BODY bool {name}(ArkCtx& c, const ArkTask& t) {{\n  return {call};\n}}\n"
