"""Copies and sums between ranks by the moving warps of the variant `matrix`: the bodies of the task
kind `combine` for plain memory, inlined into these warps' loop. Called through the dialect.
"""

from __future__ import annotations

from importlib import resources

from ark.backend.codegen.body import Body
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.combine import ELEMENTS, OPS, CombineParams, outputs, shares, terms, unit
from ark_cuda.tasks.wgmma import once


class Moves(Body):
    """The body of the task kind `combine` for data in plain memory, run by moving warps."""

    kind = "combine"
    moves = True

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return not any(o.packet for o in sig.operands)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(CombineParams)
        element = ELEMENTS[params.element].storage
        last = shares(sig)

        def pointers(const: str, indices: list[int]) -> str:
            listed = (f"ARK_POINTER({const}{element}, {text.address(sig, i)})" for i in indices)
            return f"{{{', '.join(listed)}}}"

        to = pointers("", list(range(last, len(sig.operands))))
        constants = (
            *(element, OPS[params.op], unit(sig), params.divide),
            *(last, outputs(sig)),
        )
        moved = f"ArkMoved<{element}, {last}, {outputs(sig)}>"
        every = list(range(len(sig.operands)))
        header = resources.files("ark_cuda.tasks").joinpath("moves.h").read_text()
        return once("ARK_MOVES", header) + (
            f"ARK_DEVICE void {name}_move(const ArkTask& t) {{\n"
            f"  ark_move<{', '.join(map(str, constants))}>(\n"
            f"      t, ark_aligned({text.addresses(sig, every)}),\n"
            f"      {moved}{{{pointers('const ', terms(sig))}, {to}}});\n}}\n"
        )
