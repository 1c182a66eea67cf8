"""Linear layers of several input rows. Matrix units multiply each row of weights by up to 16 input
rows at once, so the weights are read once for 16 rows.

Used in decoding of several sequences, in the variant `block` on machines with MFMA. The weights are
bf16, or codes with scales, which are converted to bf16 (linear_codes.h). The waves divide every row
of weights along k and read the input from memory, so the input's size is not limited by shared
memory. The vendor-independent body computes all other cases. Called by the source writer through
the dialect.
"""

from __future__ import annotations

from ark.backend.codegen.body import Body
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.linear import epilogue, prologue, summed
from ark.tasks.linear_form import LinearParams, dealt, row_nbytes, runs_on_units
from ark.tasks.row_values import HEADER, bytes_of
from ark_rocm.tasks.headers import read

UNIT_COLUMNS = 16  # columns of a product; with at most 8 input rows these are two halves of each
MAX_GROUP_ROWS = 64  # rows of weights that a wave multiplies at once


def unit_rows(rows: int) -> int:
    """The number of rows of weights in a product of the given number of input rows."""
    return 8 if rows <= 8 else UNIT_COLUMNS


def _blocks(sig: Signature, machine: Machine) -> int:
    """The largest number of blocks of rows of weights in a task."""
    rows, weight = sig.read(LinearParams).rows, sig.operands[1]
    stages, given = -(-weight.shape[0] // rows), sig.operands[2].shape[0]
    shares = dealt(given, weight, machine)
    return -(-(-(-stages // shares) * rows) // unit_rows(given))


def group_of(rows: int) -> int:
    """The largest number of blocks of rows of weights that a wave multiplies at once."""
    return MAX_GROUP_ROWS // unit_rows(rows)


def slab_bytes(group: int, rows: int, machine: Machine) -> int:
    """Shared memory for the waves' sums of the given number of blocks of rows of weights and `rows`
    input rows, and for the squares of the input.
    """
    tall = group * unit_rows(rows) + unit_rows(rows) // 4  # padded, for different banks
    return 4 * machine.warps * UNIT_COLUMNS * (tall + 1)


def _aligned(sig: Signature) -> bool:
    """True if the input's rows are dense and begin at multiples of 16 bytes."""
    x = sig.operands[0]
    wide = x.strides[0] * x.itemsize % 16 == 0 and x.strides[1] == 1
    return wide and x.aligned and x.shape[0] == sig.operands[2].shape[0] and not x.packet


class SeveralRows(Body):
    """A linear layer whose input rows are the columns of products on matrix units."""

    kind = "linear"
    enters = True

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return runs_on_units(sig, machine)

    def headers(self, machine: Machine) -> tuple[str, ...]:
        several = ("linear_several_input.h", "linear_several.h")
        names = ("linear.h", "lines.h", "ask.h", "linear_matrix.h", "prefetch.h", *several)
        return read(*names)

    def scratch(self, sig: Signature, machine: Machine) -> int:
        rows = sig.operands[2].shape[0]
        return slab_bytes(min(_blocks(sig, machine), group_of(rows)), rows, machine)

    def weights(self, sig: Signature) -> tuple[str, str]:
        """The device type that reads the weights, with its template arguments, and the weights'
        address.
        """
        rows = unit_rows(sig.operands[2].shape[0])
        return f"ArkSeveralDense<{sig.operands[1].shape[1]}, {rows}>", text.pointer(sig, 1)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        k, m = sig.operands[0].shape[1], sig.operands[2].shape[0]
        type_, address = self.weights(sig)
        rows = "t.coord[1] - t.coord[0]"
        first = f"static_cast<ark_i64>(t.coord[0]) * {row_nbytes(sig.operands[1])}"
        weights = f"{type_}{{(const ark_global<char>*)({address}) + {first}, {rows}, ark_lane()}}"
        blocks = _blocks(sig, machine)
        group = min(blocks, group_of(m))
        constants = (type_, k, m, group, group == blocks, _aligned(sig), True)
        operands = (weights, summed(sig, 0), prologue(sig), epilogue(sig))
        call = text.called("ark_linear_several", constants, operands)
        return f"ARK_BODY bool {name}(ArkCtx& c, const ArkTask& t) {{\n  return {call};\n}}\n"


class SeveralRowsOfCodes(SeveralRows):
    """SeveralRows with quantised weights."""

    kind = "linear_rows"

    def headers(self, machine: Machine) -> tuple[str, ...]:
        return (
            *super().headers(machine),
            HEADER,
            *read("codes.h", "code_pairs.h", "linear_codes.h"),
        )

    def weights(self, sig: Signature) -> tuple[str, str]:
        rows = unit_rows(sig.operands[2].shape[0])
        return f"ArkSeveralCodes<{sig.operands[1].ctype}, {rows}>", bytes_of(sig, 1)
