"""Properties of a linear layer's signature: the operands of its epilogue, whether its input is held
in the weights' type, and the shared memory for that.

Asked by the kind (ark.tasks.linear), by the lowering that chooses forms and variants, and by the
backends' bodies.
"""

from __future__ import annotations

from ark.ir.dtype import RowType, by_name, value_type
from ark.ir.values import Tensor
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.variant import COMMUNICATE
from ark.plan.kind import OperandType, Signature
from ark.plan.params import is_dense
from ark.tasks.linear_params import LinearParams

FLOATS = ("fp32", "fp16", "bf16")
SPREAD = ("store", "add")  # epilogues whose output peers may get too; so they may of `sample`
MAX_UNIT_INPUT_ROWS = 8  # rows that are the columns of one product of matrix units
MAX_HELD_INPUT_ELEMENTS = 512  # elements of a row that a warp holds of such an input at once
INPUT_BLOCK_ELEMENTS = 128  # elements of a row that share a factor, beside quantised weights
PART_BYTES = 8 * 64  # between the parts of such a row
MAX_ROWS_ON_UNITS = 16  # the same where Capability.ROWS_ON_UNITS says that rows cost what one costs
UNIT_DEPTH_ELEMENTS = 32  # columns of weights that such a product takes at once
MATRIX_ROWS = (16, 8, 4, 2)  # of weights in a stage that matrix units multiply by several rows
MAX_PROCESSORS_PER_TASK = 3  # of so many processors one has a task of a layer at least
# Of the epilogue's operands, those that are asked for while the weights are on the way.
AHEAD = {"store": (), "add": (0,), "swiglu": (), "rope_kv": (0, 1), "sample": (0, 1)}
EXTRA = {"store": (0,), "add": (1,), "swiglu": (0,), "rope_kv": (4, 5, 6), "sample": (3,)}


def dealt(rows: int, weights: int, row_bytes: int, machine: Machine) -> int:
    """How many processors share a linear layer of so many rows of input, and of weights.

    All of them, but where blocks that wait ask for the weights of their next tasks: there a layer
    of one row goes to as few as have all of it under way before its input is there, and to a third
    of them at least, so that memory does not stand still while it is multiplied.
    """
    asks = (
        rows == 1 and machine.has(Capability.ASKS_AHEAD) and row_bytes % (4 * machine.threads) == 0
    )
    under_way = machine.in_flight * machine.stage_bytes
    few = -(-weights * row_bytes // under_way) if asks else machine.processors
    return min(max(few, machine.processors // MAX_PROCESSORS_PER_TASK), machine.processors)


def first_extra(sig: Signature) -> int:
    """The epilogue's first operand."""
    return 4 if sig.read(LinearParams).prologue == "rmsnorm" else 3


def outputs(sig: Signature) -> tuple[int, ...]:
    """The output's operands: this rank's, then the peers'."""
    epilogue = sig.read(LinearParams).epilogue
    last = first_extra(sig) + EXTRA[epilogue][0]
    each = 1 if epilogue in SPREAD else 2 if epilogue == "sample" else 0
    return (2, *(range(last, len(sig.operands), each) if each else ()))


def candidates(sig: Signature) -> tuple[int, ...]:
    """The operands of `sample` that get candidates: this rank's, then each peer's, which comes
    behind the peer's output.
    """
    return (first_extra(sig) + 2, *(i + 1 for i in outputs(sig)[1:]))


def narrows(sig: Signature, machine: Machine) -> bool:
    """True for an input of a single row, or of few rows that are not shares, which a body for
    communicating warps keeps in the weights' type.
    """
    params = sig.read(LinearParams)
    shares, rows = sig.operands[0].shape[0], sig.operands[2].shape[0]
    single = params.split_k == 1 or params.rows == 1  # stages lie in one row each?
    return (
        machine.variant.role(COMMUNICATE) > 0
        and (single if rows == 1 else rows == shares and is_dense(sig.operands[0]))
        and narrow_rows(rows, sig.operands[1], params.split_k)
        and (rows == 1 or params.rows in MATRIX_ROWS)
    )


def reads_from_memory(sig: Signature) -> bool:
    """True where each warp of such a body reads its part of the input from memory. The input then
    has the matrix units' layout and needs no shared memory.
    """
    params = sig.read(LinearParams)
    x, weight = sig.operands[:2]
    part = x.shape[1] // params.split_k
    return (
        1 < x.shape[0] <= MAX_UNIT_INPUT_ROWS
        and params.prologue == "none"
        and params.epilogue in SPREAD
        and x.dtype == weight.dtype
        and x.itemsize == 2
        and not x.packet
        and (part <= MAX_HELD_INPUT_ELEMENTS or part % MAX_HELD_INPUT_ELEMENTS == 0)
    )


def narrow_rows(rows: int, weight: OperandType | Tensor, splits: int) -> bool:
    """True where shared memory holds `rows` input rows for weights cut into `splits` parts."""
    kind = weight.dtype if isinstance(weight, OperandType) else weight.dtype.name
    if isinstance(by_name(kind), RowType):
        return rows == splits == 1
    part, rest = divmod(weight.shape[1], splits)
    if rows == 1:
        return not rest and kind in FLOATS and part * by_name(kind).itemsize % 16 == 0
    return not rest and rows <= MAX_UNIT_INPUT_ROWS and kind in FLOATS[1:] and part % 32 == 0


def on_units(rows: int, weight: OperandType | Tensor, machine: Machine) -> bool:
    """True where matrix units multiply so many rows, read from memory, by weights in place."""
    kind = weight.dtype if isinstance(weight, OperandType) else weight.dtype.name
    dense = kind == "bf16" and weight.shape[1] % UNIT_DEPTH_ELEMENTS == 0
    able = machine.variant.name == "block" and machine.has(Capability.ROWS_ON_UNITS)
    fits = (dense and able) or codes_on_units(weight, machine)
    return fits and 1 < rows <= MAX_ROWS_ON_UNITS


def codes_on_units(weight: OperandType | Tensor, machine: Machine) -> bool:
    """True where they multiply by quantised weights: a product's columns share a scale."""
    dtype = by_name(weight.dtype) if isinstance(weight, OperandType) else weight.dtype
    able = machine.variant.name == "block" and machine.has(Capability.ROWS_ON_UNITS)
    fits = isinstance(dtype, RowType) and (
        dtype.groups == 1 or dtype.group % UNIT_DEPTH_ELEMENTS == 0
    )
    return fits and able


def most_of_codes(machine: Machine) -> int:
    """Most rows that are multiplied by codes; more are multiplied by the values of these."""
    return MAX_ROWS_ON_UNITS if machine.has(Capability.ROWS_ON_UNITS) else MAX_UNIT_INPUT_ROWS


def runs_on_units(sig: Signature, machine: Machine) -> bool:
    """True where a task has such a body, which keeps no input rows in shared memory."""
    params, rows = sig.read(LinearParams), sig.operands[2].shape[0]
    plain = params.split_k == 1 and params.epilogue != "sample"
    return plain and on_units(rows, sig.operands[1], machine)


def row_input_bytes(dtype: RowType) -> int:
    """Shared memory of an input row beside quantised weights: its parts begin at different banks,
    and its blocks have a factor each.
    """
    blocks = -(-dtype.columns // INPUT_BLOCK_ELEMENTS)
    return narrow_bytes(1, dtype.columns, dtype.values.itemsize) + PART_BYTES + 4 * blocks


def multiplied(weight: OperandType) -> str:
    """The type of floats as which a body multiplies weights."""
    return value_type(by_name(weight.dtype)).name


def row_nbytes(weight: OperandType) -> int:
    """Bytes of a row of weights."""
    return weight.shape[1] // weight.per_item * weight.itemsize


def takes_whole(rows: int, held: int, weight: Tensor) -> bool:
    """True where matrix units multiply `rows` rows by `held` whole rows of 16-bit weights at once.
    The tile's 16 rows are four rows' four parts, and its 8 columns the input's.
    """
    fits = weight.dtype.itemsize == 2 and weight.shape[1] % (64 * 4) == 0
    return fits and (rows, held) == (2, 4)


def narrow_bytes(rows: int, k: int, itemsize: int) -> int:
    """Shared memory of these rows: several begin at different banks."""
    return rows * (k * itemsize + (64 if rows > 1 else 0))


def kept_stages(warps: int, splits: int) -> int:
    """Stages of rows of weights in so many parts whose sums are kept until the last part is there.

    A part may be stored in the place of one that is so far behind: the ring has given that one's
    warp another stage since, which it took only after it had added the row up.
    """
    return -(-(2 * warps + splits) // splits) * splits


def sums_bytes(warps: int, rows: int, held: int, splits: int) -> int:
    """Shared memory that so many rows' sums take where stages have parts of `held` rows of
    weights: the warps' squares, then sums and counts of parts.
    """
    parts = kept_stages(warps, splits) * (held * rows + 1) if splits > 1 else 0
    return 4 * (warps * rows + parts)
