"""Linear layers of one input row, in which all warps of a block share each row of weights. Weights
arrive through the operand ring.

Used to decode one sequence, on a machine with a ring, if the row divides evenly among the threads.
Each warp loads its slice of the input directly to registers. In the epilogue each thread has one
output. linear.h has the device code. The vendor-independent body computes all other cases. Called
by the source writer through the dialect.
"""

from __future__ import annotations

from ark.backend.codegen.body import Body
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.linear import epilogue, prologue
from ark.tasks.linear_form import LinearParams, narrows
from ark_cuda.tasks import inline

MAX_ROWS = 256  # the most rows whose sums wait in shared memory for an epilogue


def _vector(sig: Signature, machine: Machine) -> int:
    """The number of elements of the input that a thread loads at once, or 0 if this body does not
    support the signature.
    """
    params = sig.read(LinearParams)
    rows, k = sig.operands[0].shape
    share, rest = divmod(k, machine.lanes * machine.warps)
    weight = sig.operands[1]
    if not machine.ring_bytes or rows != 1 or rest or not 0 < share <= machine.row_slice:
        return 0
    if weight.dtype not in ("fp32", "fp16", "bf16") or params.rows not in (1, 2, 4, 8):
        return 0
    if params.split_k > 1 and params.rows > 1:
        return 0
    share //= params.split_k
    return next((e for e in (8, 4, 2) if share % e == 0 and e * weight.itemsize <= 16), 0)


def _pitch(sig: Signature, machine: Machine) -> int:
    """The number of rows of weights whose sums are collected before the epilogue is applied to
    them; a multiple of a stage's rows.
    """
    rows = sig.read(LinearParams).rows
    stages = -(-sig.operands[1].shape[0] // rows)
    return min(-(-stages // machine.processors) * rows, MAX_ROWS)


class Slices(Body):
    """A linear layer in which each warp of a block multiplies one slice of every row of weights."""

    kind = "linear"

    def headers(self, machine: Machine) -> tuple[str, ...]:
        return (inline.header("packets.h"), inline.header("linear.h"))

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return not narrows(sig, machine) and _vector(sig, machine) > 0

    def scratch(self, sig: Signature, machine: Machine) -> int:
        """Bytes of shared memory for the warps' sums of products, and for their sums of the input's
        squares.
        """
        best = 8 * machine.warps if sig.read(LinearParams).epilogue == "sample" else 0
        return 4 * machine.warps * (_pitch(sig, machine) + 1) + best

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        vector = _vector(sig, machine)
        k, params = sig.operands[0].shape[1], sig.read(LinearParams)
        sizes = (params.rows, params.split_k, vector, _pitch(sig, machine))
        constants = (sig.operands[1].ctype, k, *sizes)
        operands = (text.given(sig, 0), prologue(sig), epilogue(sig))
        # The variant `matrix` runs prompts. There this body, for a layer of one row, runs once per
        # prompt, so it is not inlined.
        often = machine.variant.name != "matrix"
        call = text.called("ark_linear_slices", constants, operands)
        return inline.inlined(name, call, machine, often=often)
