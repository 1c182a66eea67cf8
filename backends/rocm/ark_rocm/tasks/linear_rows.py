"""Linear layers of one input row with quantised weights. All waves of a block share each task's
rows evenly, as in ark_rocm.tasks.linear. A load has 16 bytes of codes, and the codes' scale is
loaded with them. If a row divides into nearly equal loads for all waves, matrix units multiply
(linear_matrix_codes.h), otherwise vector units (linear_rows.h).

Used in decoding, in the variant `block`, if the codes of a load share one scale. The
vendor-independent body computes all other cases. Called by the source writer through the dialect.
"""

from __future__ import annotations

from dataclasses import dataclass

from ark.ir.dtype import RowType, by_name
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.linear import epilogue, prologue
from ark.tasks.linear_form import LinearParams, dealt
from ark.tasks.row_values import HEADER, bytes_of
from ark_rocm.tasks import linear
from ark_rocm.tasks.headers import read

LOAD_BYTES = 16
MATRIX_ROWS = 4  # rows of weights that a product of matrix units has


def row_type_of(sig: Signature) -> RowType:
    """The type of the rows of a signature's weights."""
    dtype = by_name(sig.operands[1].dtype)
    assert isinstance(dtype, RowType)
    return dtype


def _load_codes(dtype: RowType) -> int:
    """The number of codes that a lane reads with one load."""
    return LOAD_BYTES * 8 // dtype.codes.bits


def shares_scales(dtype: RowType) -> bool:
    """True if the codes that a lane reads with one load always share a scale."""
    return dtype.group % _load_codes(dtype) == 0


def parts_of(dtype: RowType, machine: Machine) -> int:
    """The number of loads with which a wave reads the codes of a weight row."""
    return -(-dtype.columns // (_load_codes(dtype) * machine.lanes))


def split_bytes(dtype: RowType, rows: int, machine: Machine, runs: int = 1, inputs: int = 1) -> int:
    """Bytes of shared memory for `inputs` input rows, and for the sums of the parts of `rows`
    weight rows of each run. A run is the rows of one weight matrix for one chosen expert; a plain
    layer has one run. In the last round, loads past the last row have sums too.
    """
    parts = parts_of(dtype, machine)
    held = parts * _load_codes(dtype) * machine.lanes
    sums = rows * parts + linear.LOADS_IN_FLIGHT * machine.warps
    return 4 * (inputs * held + runs * sums)


def _rows(sig: Signature, machine: Machine) -> int:
    """The largest number of weight rows in a task."""
    rows, count = sig.read(LinearParams).rows, sig.operands[1].shape[0]
    stages = -(-count // rows)
    return -(-stages // dealt(1, sig.operands[1], machine)) * rows


def _bytes(sig: Signature, machine: Machine) -> int:
    """Bytes of shared memory for the input row, the sums of the parts of weight rows, and
    reductions over the block.
    """
    matrix = matrix_of(sig, machine)
    if matrix:
        return matrix.nbytes
    rows = _rows(sig, machine)
    return split_bytes(row_type_of(sig), rows, machine) + 8 * machine.warps


@dataclass(frozen=True)
class Matrix:
    """How matrix units multiply quantised weights, four rows at a time. ahead: groups of four rows
    whose loads are in flight. pieces: a wave's loads of such a group. chunk: the pieces of the
    input that are in shared memory at once. nbytes: shared memory for the input and the sums.
    """

    ahead: int
    pieces: int
    chunk: int
    nbytes: int


def matrix_of(sig: Signature, machine: Machine) -> Matrix | None:
    """Returns None if matrix units do not multiply these weights."""
    dtype = row_type_of(sig)
    codes = _load_codes(dtype)
    span = machine.lanes // MATRIX_ROWS * codes  # codes of a row in a wave's load
    pieces = -(-dtype.columns // (span * machine.warps))
    full = dtype.columns >= linear.MIN_MATRIX_FILL_SHARE * pieces * span * machine.warps
    whole = dtype.columns % codes == 0
    # The input takes 4 registers for each 8 codes of a lane.
    fits = pieces * codes <= 8 * linear.MATRIX_LOADS_IN_FLIGHT
    if not (full and whole and fits) or not machine.has(Capability.MFMA) or machine.lanes != 64:
        return None
    fours = -(-_rows(sig, machine) // MATRIX_ROWS)
    ahead = min(fours, linear.MATRIX_LOADS_IN_FLIGHT // pieces)
    chunk = min(pieces, -(-linear.MATRIX_CHUNK_PIECES * linear.MATRIX_PIECE_ELEMENTS // span))
    sums = -(-(-(-fours // ahead) * ahead) // 4) * 16 * machine.warps
    spread = 3 * (chunk * span + 16) * machine.warps
    nbytes = 4 * (sums + 2 * machine.warps) + 2 * spread
    return Matrix(ahead, pieces, chunk, nbytes) if nbytes <= machine.shared_bytes else None


class OneRow(linear.OneRow):
    """A linear layer with quantised weights, in which all waves of a block share a task's codes."""

    kind = "linear_rows"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        dtype = row_type_of(sig)
        return (
            machine.variant.name == "block"
            and sig.operands[0].shape[0] == sig.operands[2].shape[0] == 1
            and shares_scales(dtype)
            and _bytes(sig, machine) <= machine.shared_bytes
        )

    def headers(self, machine: Machine) -> tuple[str, ...]:
        own = read("codes.h", "held_rows.h", "prefetch.h", "linear_rows.h")
        if machine.has(Capability.MFMA):
            own = (*own, *read("code_pairs.h", "linear_matrix_codes.h"))
        return (*super().headers(machine), HEADER, *own)

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return _bytes(sig, machine)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        operands = (bytes_of(sig, 1), text.given(sig, 0), prologue(sig), epilogue(sig))
        ctype = sig.operands[1].ctype
        sizes: tuple[int, ...]
        matrix = matrix_of(sig, machine)
        if matrix:
            sizes = (_rows(sig, machine), matrix.ahead, matrix.chunk)
            call = text.called("ark_linear_matrix_codes", (ctype, *sizes), operands)
        else:
            sizes = (parts_of(row_type_of(sig), machine), _rows(sig, machine))
            call = text.called("ark_linear_split_codes", (ctype, *sizes), operands)
        return f"ARK_BODY bool {name}(ArkCtx& c, const ArkTask& t) {{\n  return {call};\n}}\n"
