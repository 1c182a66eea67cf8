"""Products with the quantised weights of the selected experts on matrix units. They are computed as
linear layers of several rows of which only one row exists.

Used in the variant `block` on machines with MFMA, for the weights that linear_several supports. The
common body computes all other cases. Called by the writer through the dialect.
"""

from __future__ import annotations

from ark.codegen.body import Body
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.experts import share_of
from ark.tasks.linear_form import codes_on_units
from ark.tasks.row_values import HEADER, bytes_of
from ark_rocm.tasks.linear_rows import read
from ark_rocm.tasks.linear_several import MOST_GROUP, SeveralRows, slab_bytes


class Experts(Body):
    """Multiplies rows of an expert's weights by one row of the input."""

    kind = "expert_linear"
    enters = True

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return codes_on_units(sig.operands[1], machine)

    def headers(self, machine: Machine) -> tuple[str, ...]:
        own = read("codes.h", "linear_codes.h", "experts.h")
        return (*SeveralRows().headers(machine), HEADER, *own)

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return slab_bytes(MOST_GROUP, machine)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        x, weight = sig.operands[:2]
        dense = x.strides[-1] == 1 and all(s * x.itemsize % 16 == 0 for s in x.strides[:-1])
        constants = (
            *(weight.ctype, *weight.shape[:2], len(x.shape) == 3, *share_of(sig)),
            *(MOST_GROUP, dense and x.aligned and not x.packet),
        )
        given = (text.given(sig, 0), bytes_of(sig, 1), text.given(sig, 2))
        operands = (*given, text.given(sig, 3, const=False))
        call = text.called("ark_expert_several", constants, operands)
        return f"ARK_BODY bool {name}(ArkCtx& c, const ArkTask& t) {{\n  return {call};\n}}\n"
