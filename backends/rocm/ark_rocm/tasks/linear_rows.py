"""Linear layers of one input row with quantised weights. All waves of a block share each task's
rows evenly, as in ark_rocm.tasks.linear. A load has 16 bytes of codes, and the codes' scale is
loaded with them.

Used in decoding, in the variant `block`, if the codes of a load share one scale. The
vendor-independent body computes all other cases. Called by the source writer through the dialect.
"""

from __future__ import annotations

from ark.ir.dtype import RowType, by_name
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.linear import epilogue, prologue
from ark.tasks.linear_form import LinearParams, dealt
from ark.tasks.row_values import HEADER, bytes_of
from ark_rocm.tasks import linear
from ark_rocm.tasks.headers import read

LOAD_BYTES = 16


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
    sums = rows * parts + linear.LOADS_AHEAD * machine.warps
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
    rows = _rows(sig, machine)
    return split_bytes(row_type_of(sig), rows, machine) + 8 * machine.warps


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
        return (*super().headers(machine), HEADER, *read("codes.h", "held_rows.h", "linear_rows.h"))

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return _bytes(sig, machine)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        parts = parts_of(row_type_of(sig), machine)
        constants = (sig.operands[1].ctype, parts, _rows(sig, machine))
        operands = (bytes_of(sig, 1), text.given(sig, 0), prologue(sig), epilogue(sig))
        call = text.called("ark_linear_split_codes", constants, operands)
        return f"ARK_BODY bool {name}(ArkCtx& c, const ArkTask& t) {{\n  return {call};\n}}\n"
