"""Products of input rows with the weights of chosen experts, in the variant `roles`. The experts
are known only when the task runs, so their weights do not pass through the ring of stages. Each
warp loads the weights of its next outputs to registers while it multiplies the current ones.

Serves weights of 16 bits, and quantised weights without zero points of which all codes in 16 bytes
share a scale. The vendor-independent body computes all other cases. Called through the dialect.
"""

from __future__ import annotations

from ark.backend.codegen.body import Body
from ark.ir.dtype import RowType, by_name
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.expert_epilogue import MAX_SLOTS, constants, declared, weight_operands
from ark.tasks.experts import HEADERS, MAX_TOTAL_RESULTS, outputs_of_task, share_of
from ark.tasks.row_values import HEADER, bytes_of
from ark_cuda.tasks import inline

PIECE_BYTES = 16
# The most pieces of weights (16 bytes, 4 registers) that a lane holds for one step along k. Beside
# them it holds as many for the next step, which are loaded meanwhile.
MAX_HELD_PIECES = 6
WARP_LANES = 32


def _codes(sig: Signature) -> int:
    """The number of weights in a piece of 16 bytes; 0 if the body does not support the weights."""
    weight, columns = by_name(sig.operands[1].dtype), sig.operands[1].shape[2]
    if not isinstance(weight, RowType):
        codes = PIECE_BYTES // weight.itemsize if weight.name in ("bf16", "fp16") else 0
        return codes if codes and columns % codes == 0 else 0
    codes = PIECE_BYTES * 8 // weight.codes.bits
    whole = columns % codes == 0 and weight.group % codes == 0
    return codes if whole and not weight.zeros else 0


def _each(sig: Signature) -> int:
    """The number of pieces of a row that a lane multiplies."""
    return -(-sig.operands[1].shape[2] // (_codes(sig) * WARP_LANES))


class Ahead(Body):
    """Multiplies input rows by chosen experts' weights, which a warp loads one step ahead."""

    kind = "expert_linear"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        first, of = share_of(sig)
        whole = first == 0 and of == sig.operands[1].shape[0]
        aligned = all(sig.operands[i].aligned for i in weight_operands(sig))
        given = sig.operands[0]
        return (
            inline.leads(machine)
            and machine.lanes == WARP_LANES
            and whole
            and aligned
            and _codes(sig) > 0
            and given.dtype == "fp32"
            and given.strides[-1] == 1
            and all(stride % 2 == 0 for stride in given.strides[:-1])
            and (not constants(sig)[1] or outputs_of_task(sig, machine) <= MAX_TOTAL_RESULTS)
            and self.scratch(sig, machine) <= machine.task_bytes
        )

    def headers(self, machine: Machine) -> tuple[str, ...]:
        names = ("float_pairs.h", "linear_codes.h")
        own = (*map(inline.header, names), *HEADERS, inline.header("experts_ahead.h"))
        return (HEADER, *own)

    def scratch(self, sig: Signature, machine: Machine) -> int:
        """Bytes of shared memory for an input row, totals and the numbers of the experts."""
        return 4 * (_each(sig) * WARP_LANES * _codes(sig) + MAX_TOTAL_RESULTS + MAX_SLOTS)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        weight, slots = sig.operands[1], len(sig.operands[0].shape) == 3
        weights, total = constants(sig)
        outputs = 1 if weights > 1 else 2
        parts = -(-_each(sig) // (MAX_HELD_PIECES // (weights * outputs)))
        row = weight.ctype
        if not isinstance(by_name(weight.dtype), RowType):
            row = f"ArkFloatRow<{row}, {weight.shape[2]}>"
        sizes = (row, weight.shape[1], slots, share_of(sig)[1], weights, total, outputs, parts)
        x, experts = (text.given(sig, i) for i in (0, 2))
        given = (bytes_of(sig, 1), bytes_of(sig, weight_operands(sig)[-1]))
        call = text.called("ark_expert_ahead", sizes, (x, *given, experts, "finish"))
        return text.function(name, f"{declared(sig)}  {call};\n")
