"""Products with the quantised weights of chosen experts, one row of input each: by vector units, as
linear layers of one row, where the codes of a load share a scale and each wave has the same part of
all rows; else by matrix units, as linear layers of several rows.

Serves weights that such layers take, in the variant `block` on machines with MFMA; everything else
is the common body's. Called by the writer through the dialect.
"""

from __future__ import annotations

from ark.codegen.body import Body
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.experts import share_of
from ark.tasks.linear_form import codes_on_units
from ark.tasks.row_values import HEADER, bytes_of
from ark_rocm.tasks.linear_rows import (
    parts_of,
    read,
    row_type_of,
    shares_scales,
    split_bytes,
)
from ark_rocm.tasks.linear_several import MOST_GROUP, SeveralRows, slab_bytes

MOST_SUMS = 6144  # sums in shared memory at once


def _rows(sig: Signature, machine: Machine) -> int:
    """The most outputs whose sums shared memory holds at once on vector units; 0 if matrix units
    multiply.
    """
    dtype = row_type_of(sig)
    parts = parts_of(dtype, machine)
    fits = shares_scales(dtype) and machine.warps % parts == 0
    return min(sig.operands[1].shape[1], MOST_SUMS // parts) if fits else 0


class Experts(Body):
    """Multiplies rows of an expert's weights by one row of the input."""

    kind = "expert_linear"
    enters = True

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return codes_on_units(sig.operands[1], machine)

    def headers(self, machine: Machine) -> tuple[str, ...]:
        own = read("codes.h", "linear_codes.h", "linear_rows.h", "experts.h")
        return (*SeveralRows().headers(machine), HEADER, *own)

    def scratch(self, sig: Signature, machine: Machine) -> int:
        rows = _rows(sig, machine)
        return (
            split_bytes(row_type_of(sig), rows, machine)
            if rows
            else slab_bytes(MOST_GROUP, machine)
        )

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        x, weight = sig.operands[:2]
        dense = x.strides[-1] == 1 and all(s * x.itemsize % 16 == 0 for s in x.strides[:-1])
        common = (weight.ctype, *weight.shape[:2], len(x.shape) == 3, *share_of(sig))
        own: tuple[object, ...]
        rows = _rows(sig, machine)
        if rows:
            form, own = "split", (parts_of(row_type_of(sig), machine), rows)
        else:
            form, own = "several", (MOST_GROUP, dense and x.aligned and not x.packet)
        given = (text.given(sig, 0), bytes_of(sig, 1), text.given(sig, 2))
        operands = (*given, text.given(sig, 3, const=False))
        call = text.called(f"ark_expert_{form}", (*common, *own), operands)
        return f"ARK_BODY bool {name}(ArkCtx& c, const ArkTask& t) {{\n  return {call};\n}}\n"
