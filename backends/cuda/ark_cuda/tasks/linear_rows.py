"""Linear layers of one input row with quantised weights, in the variant `roles`. Each stage of rows
belongs to one warp, which converts the codes to operands of matrix units.

linear_rows.h, row_tiles.h and linear_codes.h have the device code. The vendor-independent body
computes all other cases. Called through the dialect.
"""

from __future__ import annotations

from ark.backend.codegen.body import BoxMap
from ark.ir.dtype import RowType, by_name
from ark.ir.epilogues import EPILOGUES
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.linear import epilogue, prologue
from ark.tasks.linear_form import LinearParams, row_input_bytes
from ark.tasks.row_values import HEADER
from ark_cuda.tasks import inline, linear_roles

INPUT_ALIGNMENT_BYTES = 16
# Rows that all warps multiply together, and the number of columns from which on they do: shorter
# rows have too few units for all warps.
SHARED_ROWS = 16
SHARED_COLUMNS = 4096


def _row_type(sig: Signature) -> RowType:
    dtype = by_name(sig.operands[1].dtype)
    assert isinstance(dtype, RowType)
    return dtype


def _input_bytes(sig: Signature) -> int:
    held = row_input_bytes(_row_type(sig))
    return -(-held // INPUT_ALIGNMENT_BYTES) * INPUT_ALIGNMENT_BYTES


def _shared(sig: Signature, machine: Machine) -> bool:
    """True if all warps divide the rows of a task along k. With 4-bit codes this took longer on an
    H200.
    """
    params, columns = sig.read(LinearParams), sig.operands[1].shape[1]
    wide = _row_type(sig).codes.bits == 8 and columns >= SHARED_COLUMNS
    plain = params.prologue == "none" and params.epilogue != "sample"
    held = SHARED_ROWS // params.rows <= machine.variant.stages
    few = linear_roles.task_rows(sig, machine) <= SHARED_ROWS
    return wide and plain and held and few and not EPILOGUES[params.epilogue].paired


class Rows(linear_roles.Roles):
    """A linear layer in the variant `roles`, in which each stage of quantised rows belongs to one
    warp.
    """

    kind = "linear_rows"

    def headers(self, machine: Machine) -> tuple[str, ...]:
        names = ("float_pairs.h", "linear_codes.h", "row_tiles.h", "linear_rows.h")
        return (*super().headers(machine), HEADER, *map(inline.header, names))

    def scratch(self, sig: Signature, machine: Machine) -> int:
        """Bytes of shared memory for the input row, and for each warp's sum of squares and best
        logit, or its parts of the rows' sums.
        """
        sums = 4 * SHARED_ROWS * machine.warps if _shared(sig, machine) else 0
        return _input_bytes(sig) + 4 * 3 * machine.warps + sums

    def maps(self, sig: Signature, machine: Machine) -> tuple[BoxMap, ...]:
        """Empty: a stage is contiguous in memory, so it is copied without a tensor map."""
        return ()

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        """The source of the function that the computing warps run."""
        params, values = sig.read(LinearParams), _row_type(sig).values.storage
        given = sig.operands[0].shape[0]
        # With two ranks, the order in which the shares are added does not change the sum. So both
        # ranks begin with share 0. Their kernels are then equal, and one kernel is compiled for
        # both.
        shares = (given, params.first if given > 2 else 0)
        constants = (sig.operands[1].ctype, values, params.rows, _input_bytes(sig), *shares)
        operands = (text.given(sig, 0), prologue(sig), epilogue(sig))
        name_of = "ark_linear_row_shared" if _shared(sig, machine) else "ark_linear_row_stages"
        call = text.called(name_of, constants, operands)
        return inline.inlined(name, call, machine)
