"""Linear layers of one input row with quantised weights, in the variant `roles`. Each stage of rows
belongs to one warp, which converts the codes to operands of matrix units.

linear_rows.h, row_tiles.h and linear_codes.h have the device code. The vendor-independent body
computes all other cases. Called through the dialect.
"""

from __future__ import annotations

from ark.backend.codegen.body import BoxMap
from ark.ir.dtype import RowType, by_name
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.linear import epilogue, prologue
from ark.tasks.linear_form import LinearParams, row_input_bytes
from ark.tasks.row_values import HEADER
from ark_cuda.tasks import inline, linear_roles

INPUT_ALIGNMENT_BYTES = 16


def _row_type(sig: Signature) -> RowType:
    dtype = by_name(sig.operands[1].dtype)
    assert isinstance(dtype, RowType)
    return dtype


def _input_bytes(sig: Signature) -> int:
    held = row_input_bytes(_row_type(sig))
    return -(-held // INPUT_ALIGNMENT_BYTES) * INPUT_ALIGNMENT_BYTES


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
        logit.
        """
        return _input_bytes(sig) + 4 * 3 * machine.warps

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
        call = text.called("ark_linear_row_stages", constants, operands)
        return inline.inlined(name, call, machine)
