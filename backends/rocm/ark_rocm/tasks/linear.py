"""Linear layers of one input row, in which all waves of a block share each task's weights evenly.

Used in decoding, in the variant `block`, for one input row and weights whose rows consist of whole
16-byte loads. If a row of bf16 weights divides into nearly equal loads for all waves, matrix units
multiply (linear_matrix.h). Otherwise rows are cut into parts, which are assigned to the waves
round-robin (linear.h). The body begins before its task's waits (Body.enters), because no task
writes the weights. The vendor-independent body computes all other cases. Called by the source
writer through the dialect.
"""

from __future__ import annotations

from ark.backend.codegen.body import Body
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.linear import epilogue, prologue
from ark.tasks.linear_form import LinearParams, dealt
from ark_rocm.tasks.headers import read

LOADS_IN_FLIGHT = 4  # loads of a wave in flight: AHEAD in linear.h
MATRIX_PIECE_ELEMENTS = 128  # elements that a wave's load reads of each of four rows
MATRIX_LOADS_IN_FLIGHT = 16  # loads of a wave in flight with matrix units: 64 registers
MIN_MATRIX_FILL_SHARE = 7 / 8  # the least share of these loads that is within a row
MATRIX_CHUNK_PIECES = 4  # pieces of the input that are in shared memory at once
_TYPES = ("fp32", "fp16", "bf16")


def _parts(sig: Signature, machine: Machine) -> int:
    """The number of loads with which a wave reads a row of the weights. A load has 16 bytes per
    lane.
    """
    weight = sig.operands[1]
    return -(-sig.operands[0].shape[1] * weight.itemsize // (16 * machine.lanes))


def _rows(sig: Signature, machine: Machine) -> int:
    """The largest number of weight rows in a task."""
    rows, weight = sig.read(LinearParams).rows, sig.operands[1]
    stages = -(-weight.shape[0] // rows)
    shares = dealt(sig.operands[2].shape[0], weight, machine)
    return -(-stages // shares) * rows


def _matrix(sig: Signature, machine: Machine) -> tuple[int, int] | None:
    """How a wave loads weights for the matrix units, which multiply four rows at a time: the number
    of such groups of four rows in flight, and the number of loads for a wave's part of each group.
    None if matrix units do not multiply these weights.
    """
    weight = sig.operands[1]
    columns, each = weight.shape[1], MATRIX_PIECE_ELEMENTS * machine.warps
    pieces = -(-columns // each)
    full = columns % 8 == 0 and columns >= MIN_MATRIX_FILL_SHARE * pieces * each
    fits = weight.dtype == "bf16" and full and pieces <= MATRIX_LOADS_IN_FLIGHT
    if not fits or not machine.has(Capability.MFMA) or machine.lanes != 64:
        return None
    fours = -(-_rows(sig, machine) // 4)
    return min(fours, MATRIX_LOADS_IN_FLIGHT // pieces), pieces


def _bytes(sig: Signature, machine: Machine) -> int:
    """Bytes of shared memory for the input row, the sums of the parts of weight rows, and
    reductions over the block.
    """
    matrix = _matrix(sig, machine)
    if matrix:
        ahead, pieces = matrix
        fours = -(-_rows(sig, machine) // 4)
        sums = -(-fours // ahead) * ahead * 4 * machine.warps
        spread = 3 * (min(pieces, MATRIX_CHUNK_PIECES) * MATRIX_PIECE_ELEMENTS + 16) * machine.warps
        return 4 * (sums + 2 * machine.warps) + 2 * spread
    k = sig.operands[0].shape[1]
    sums = _rows(sig, machine) * _parts(sig, machine) + LOADS_IN_FLIGHT * machine.warps
    return 4 * (k + sums + 2 * machine.warps)


class OneRow(Body):
    """A linear layer in which all waves of a block share a task's weights."""

    kind = "linear"
    enters = True

    def serves(self, sig: Signature, machine: Machine) -> bool:
        weight = sig.operands[1]
        return (
            machine.variant.name == "block"
            and sig.operands[0].shape[0] == sig.operands[2].shape[0] == 1
            and sig.read(LinearParams).split_k == 1
            and weight.dtype in _TYPES
            and weight.shape[1] * weight.itemsize % 16 == 0
            and _bytes(sig, machine) <= machine.shared_bytes
        )

    def headers(self, machine: Machine) -> tuple[str, ...]:
        matrix = ("ask.h", "linear_matrix.h") if machine.has(Capability.MFMA) else ()
        names = ("linear.h", "lines.h", *matrix)
        return read(*names)

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return _bytes(sig, machine)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        k, rows = sig.operands[0].shape[1], _rows(sig, machine)
        weights = f"{text.given(sig, 1)}.p"
        operands = (weights, text.given(sig, 0), prologue(sig), epilogue(sig))
        matrix = _matrix(sig, machine)
        if matrix:
            sizes = (k, rows, matrix[0], min(matrix[1], MATRIX_CHUNK_PIECES))
            call = text.called("ark_linear_matrix", sizes, operands)
        else:
            constants = (sig.operands[1].ctype, k, _parts(sig, machine), rows)
            call = text.called("ark_linear_split", constants, operands)
        return f"ARK_BODY bool {name}(ArkCtx& c, const ArkTask& t) {{\n  return {call};\n}}\n"
