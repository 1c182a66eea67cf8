"""Properties of a linear layer's signature: the operands of its epilogue, whether its input is kept
in the weights' type, and the shared memory for it.

Used by the kind (ark.tasks.linear), by the lowering that chooses forms and variants, and by the
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
SPREAD = ("store", "add")  # epilogues whose output peers may get, too; `sample` also
MAX_UNIT_INPUT_ROWS = 8  # input rows in one matrix-unit product, as its columns
MAX_HELD_INPUT_ELEMENTS = 512  # elements of a row of such an input that a warp holds at once
INPUT_BLOCK_ELEMENTS = 128  # elements of a row that share a scale, for quantised weights
PART_BYTES = 8 * 64  # bytes between the parts of such a row
MAX_ROWS_ON_UNITS = 16  # input rows with Capability.ROWS_ON_UNITS, at the cost of one
UNIT_DEPTH_ELEMENTS = 32  # columns of weights that such a product processes at once
MATRIX_ROWS = (16, 8, 4, 2)  # weight rows in a stage for matrix units, with several input rows
MAX_PROCESSORS_PER_TASK = 3  # one processor in this many gets a task of a layer, or more
# By epilogue: its operands that are loaded early, while the weights are in transit.
AHEAD = {"store": (), "add": (0,), "swiglu": (), "rope_kv": (0, 1), "sample": (0, 1)}
EXTRA = {"store": (0,), "add": (1,), "swiglu": (0,), "rope_kv": (4, 5, 6), "sample": (3,)}


def dealt(rows: int, weights: int, row_bytes: int, machine: Machine) -> int:
    """The number of processors that share a linear layer with this many input rows and weight rows.

    Usually all processors. With the capability ASKS_AHEAD, in which waiting blocks prefetch the
    weights of their next tasks, a layer of one input row gets only as many as can have all of its
    weights in flight before the input arrives, but at least one in MAX_PROCESSORS_PER_TASK, so that
    memory is not idle during the multiplication.
    """
    asks = (
        rows == 1 and machine.has(Capability.ASKS_AHEAD) and row_bytes % (4 * machine.threads) == 0
    )
    under_way = machine.in_flight * machine.stage_bytes
    few = -(-weights * row_bytes // under_way) if asks else machine.processors
    return min(max(few, machine.processors // MAX_PROCESSORS_PER_TASK), machine.processors)


def first_extra(sig: Signature) -> int:
    """The index of the epilogue's first operand."""
    return 4 if sig.read(LinearParams).prologue == "rmsnorm" else 3


def outputs(sig: Signature) -> tuple[int, ...]:
    """The indices of the output operands: this rank's first, then the peers'."""
    epilogue = sig.read(LinearParams).epilogue
    last = first_extra(sig) + EXTRA[epilogue][0]
    each = 1 if epilogue in SPREAD else 2 if epilogue == "sample" else 0
    return (2, *(range(last, len(sig.operands), each) if each else ()))


def candidates(sig: Signature) -> tuple[int, ...]:
    """The indices of the operands of `sample` that receive candidates: this rank's first, then each
    peer's, which follows the peer's output.
    """
    return (first_extra(sig) + 2, *(i + 1 for i in outputs(sig)[1:]))


def narrows(sig: Signature, machine: Machine) -> bool:
    """True if a body for communicating warps keeps the input in the weights' type: the input is a
    single row, or a few rows that are not shares.
    """
    params = sig.read(LinearParams)
    shares, rows = sig.operands[0].shape[0], sig.operands[2].shape[0]
    single = params.split_k == 1 or params.rows == 1  # not parts of several rows
    return (
        machine.variant.role(COMMUNICATE) > 0
        and (single if rows == 1 else rows == shares and is_dense(sig.operands[0]))
        and narrow_rows(rows, sig.operands[1], params.split_k)
        and (rows == 1 or params.rows in MATRIX_ROWS)
    )


def reads_from_memory(sig: Signature) -> bool:
    """True if each warp of such a body reads its part of the input from memory. The input then has
    the layout of the matrix units and needs no shared memory.
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
    """True if shared memory can hold `rows` input rows for weights split into `splits` parts along
    k.
    """
    kind = weight.dtype if isinstance(weight, OperandType) else weight.dtype.name
    if isinstance(by_name(kind), RowType):
        return rows == splits == 1
    part, rest = divmod(weight.shape[1], splits)
    if rows == 1:
        return not rest and kind in FLOATS and part * by_name(kind).itemsize % 16 == 0
    return not rest and rows <= MAX_UNIT_INPUT_ROWS and kind in FLOATS[1:] and part % 32 == 0


def on_units(rows: int, weight: OperandType | Tensor, machine: Machine) -> bool:
    """True if matrix units can multiply so many input rows, read from memory, by these weights."""
    kind = weight.dtype if isinstance(weight, OperandType) else weight.dtype.name
    dense = kind == "bf16" and weight.shape[1] % UNIT_DEPTH_ELEMENTS == 0
    able = machine.variant.name == "block" and machine.has(Capability.ROWS_ON_UNITS)
    fits = (dense and able) or codes_on_units(weight, machine)
    return fits and 1 < rows <= MAX_ROWS_ON_UNITS


def codes_on_units(weight: OperandType | Tensor, machine: Machine) -> bool:
    """True if matrix units can multiply by these quantised weights: the columns of a product share
    a scale.
    """
    dtype = by_name(weight.dtype) if isinstance(weight, OperandType) else weight.dtype
    able = machine.variant.name == "block" and machine.has(Capability.ROWS_ON_UNITS)
    fits = isinstance(dtype, RowType) and (
        dtype.groups == 1 or dtype.group % UNIT_DEPTH_ELEMENTS == 0
    )
    return fits and able


def most_of_codes(machine: Machine) -> int:
    """The most input rows that are multiplied by the codes directly; for more, the weights are
    dequantised first.
    """
    return MAX_ROWS_ON_UNITS if machine.has(Capability.ROWS_ON_UNITS) else MAX_UNIT_INPUT_ROWS


def runs_on_units(sig: Signature, machine: Machine) -> bool:
    """True if a task has such a body, which keeps no input rows in shared memory."""
    params, rows = sig.read(LinearParams), sig.operands[2].shape[0]
    plain = params.split_k == 1 and params.epilogue != "sample"
    return plain and on_units(rows, sig.operands[1], machine)


def row_input_bytes(dtype: RowType) -> int:
    """Bytes of shared memory for an input row with quantised weights. Its parts begin at different
    banks, and each of its blocks has a scale.
    """
    blocks = -(-dtype.columns // INPUT_BLOCK_ELEMENTS)
    return narrow_bytes(1, dtype.columns, dtype.values.itemsize) + PART_BYTES + 4 * blocks


def multiplied(weight: OperandType) -> str:
    """The name of the floating-point type in which a body multiplies the weights."""
    return value_type(by_name(weight.dtype)).name


def row_nbytes(weight: OperandType) -> int:
    """Bytes of a row of weights."""
    return weight.shape[1] // weight.per_item * weight.itemsize


def takes_whole(rows: int, held: int, weight: Tensor) -> bool:
    """True if matrix units multiply `rows` input rows by `held` whole rows of 16-bit weights at
    once. The 16 rows of the unit's tile are the four parts of four weight rows, and its 8 columns
    are the input's.
    """
    fits = weight.dtype.itemsize == 2 and weight.shape[1] % (64 * 4) == 0
    return fits and (rows, held) == (2, 4)


def narrow_bytes(rows: int, k: int, itemsize: int) -> int:
    """Bytes of shared memory for these input rows; if there are several, they begin at different
    banks.
    """
    return rows * (k * itemsize + (64 if rows > 1 else 0))


def kept_stages(warps: int, splits: int) -> int:
    """The number of stages whose sums are kept until the last part of the row has arrived; `splits`
    is the number of parts of a row.

    The sums of a part may replace those of a part this many stages earlier: that part's warp has
    got another stage from the ring since, and it takes one only after it has added up the row.
    """
    return -(-(2 * warps + splits) // splits) * splits


def sums_bytes(warps: int, rows: int, held: int, splits: int) -> int:
    """Bytes of shared memory for sums: the warps' sums of squares and, if stages are parts of
    `held` rows of weights, the sums and counts of parts.
    """
    parts = kept_stages(warps, splits) * (held * rows + 1) if splits > 1 else 0
    return 4 * (warps * rows + parts)
