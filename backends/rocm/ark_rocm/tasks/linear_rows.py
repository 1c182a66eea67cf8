"""Linear layers of one input row with quantised weights. All waves of a block share each task's
rows evenly, as in ark_rocm.tasks.linear. A load has 16 bytes of codes, and their scale is loaded
with it.

Used in decoding, in the variant `block`, if the codes of a load share one scale. The common body
computes all other cases. Called by the writer through the dialect.
"""

from __future__ import annotations

from importlib import resources

from ark.ir.dtype import RowType, by_name
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.linear import epilogue, prologue
from ark.tasks.linear_form import dealt
from ark.tasks.linear_params import LinearParams
from ark.tasks.row_values import HEADER, bytes_of
from ark_rocm.tasks import linear

LOAD_BYTES = 16


def read(*names: str) -> tuple[str, ...]:
    """The texts of the device headers in this folder."""
    return tuple((resources.files("ark_rocm") / "tasks" / name).read_text() for name in names)


def _row_type(sig: Signature) -> RowType:
    dtype = by_name(sig.operands[1].dtype)
    assert isinstance(dtype, RowType)
    return dtype


def _load_codes(dtype: RowType) -> int:
    """The number of codes in a lane's load."""
    return LOAD_BYTES * 8 // dtype.codes.bits


def _parts(sig: Signature, machine: Machine) -> int:
    """The number of loads that a wave needs for a row."""
    dtype = _row_type(sig)
    return -(-dtype.columns // (_load_codes(dtype) * machine.lanes))


def _rows(sig: Signature, machine: Machine) -> int:
    """The largest number of rows of a task."""
    rows, count = sig.read(LinearParams).rows, sig.operands[1].shape[0]
    stages = -(-count // rows)
    return -(-stages // dealt(1, count, _row_type(sig).itemsize, machine)) * rows


def _bytes(sig: Signature, machine: Machine) -> int:
    """Shared memory for the input row, the parts' sums, and the reductions over the block."""
    parts = _parts(sig, machine)
    held = parts * _load_codes(_row_type(sig)) * machine.lanes
    sums = _rows(sig, machine) * parts + linear.LOADS_AHEAD * machine.warps
    return 4 * (held + sums + 2 * machine.warps)


class OneRow(linear.OneRow):
    """A linear layer in which all waves of a block share a task's codes."""

    kind = "linear_rows"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        dtype = _row_type(sig)
        return (
            machine.variant.name == "block"
            and sig.operands[0].shape[0] == sig.operands[2].shape[0] == 1
            and dtype.group % _load_codes(dtype) == 0
            and _bytes(sig, machine) <= machine.shared_bytes
        )

    def headers(self, machine: Machine) -> tuple[str, ...]:
        return (*super().headers(machine), HEADER, *read("codes.h", "linear_rows.h"))

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return _bytes(sig, machine)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        constants = (sig.operands[1].ctype, _parts(sig, machine), _rows(sig, machine))
        operands = (bytes_of(sig, 1), text.given(sig, 0), prologue(sig), epilogue(sig))
        call = text.called("ark_linear_split_codes", constants, operands)
        return f"ARK_BODY bool {name}(ArkCtx& c, const ArkTask& t) {{\n  return {call};\n}}\n"
