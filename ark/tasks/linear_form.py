"""Properties of a linear layer: the operands of its epilogue, whether its input is kept in the
weights' type, and the shared memory that it needs.

Used by the task kind (ark.tasks.linear), by the lowerings that choose tiles and kernel variants,
and by the backends' device functions.
"""

from __future__ import annotations

from ark.ir.dtype import RowType, by_name, value_type
from ark.ir.epilogues import EPILOGUES
from ark.ir.values import Tensor
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.variant import COMMUNICATE
from ark.plan.kind import OperandType, Signature
from ark.plan.params import is_dense
from ark.tasks.linear_params import LinearParams

FLOATS = ("fp32", "fp16", "bf16")
MAX_UNIT_INPUT_ROWS = 8  # input rows in one matrix-unit product, as its columns
MAX_HELD_INPUT_ELEMENTS = 512  # elements of an input row that a warp holds in registers at once
INPUT_BLOCK_ELEMENTS = 128  # elements of a row that share a scale, for quantised weights
PART_BYTES = 8 * 64  # bytes between the parts of an input row, for quantised weights
MAX_ROWS_ON_UNITS = 16  # with Capability.ROWS_ON_UNITS, this many input rows cost as much as one
UNIT_DEPTH_ELEMENTS = 32  # columns of weights that are processed at once with ROWS_ON_UNITS
MATRIX_ROWS = (16, 8, 4, 2)  # weight rows in a stage for matrix units, with several input rows
MAX_PROCESSORS_PER_TASK = 3  # at least one in this many processors gets a task of a layer


def dealt(rows: int, weight: OperandType | Tensor, machine: Machine) -> int:
    """The number of processors that share a linear layer. rows: input rows.

    Usually all processors share the layer. With the capability ASKS_AHEAD, waiting blocks prefetch
    the weights of their next tasks. A layer of one input row, or of at most MAX_UNIT_INPUT_ROWS on
    matrix units, is then given only as many processors as can have all of its weights in flight
    before the input arrives. The other processors can prefetch for the next layer. At least one of
    every MAX_PROCESSORS_PER_TASK processors takes part.

    A layer with fewer rows of weights than processors, such as a router of experts, is given half
    as many processors as it has rows. So it can run on processors that had no task of the preceding
    layer.
    """
    few_rows = rows == 1 or (rows <= MAX_UNIT_INPUT_ROWS and on_units(rows, weight, machine))
    asks = few_rows and machine.has(Capability.ASKS_AHEAD)
    count, nbytes = weight.shape[0], row_nbytes(weight)
    if asks and count < machine.processors:
        return max(1, count // 2)
    asks = asks and nbytes % (4 * machine.threads) == 0
    under_way = machine.in_flight * machine.stage_bytes
    few = -(-count * nbytes // under_way) if asks else machine.processors
    return min(max(few, machine.processors // MAX_PROCESSORS_PER_TASK), machine.processors)


def first_extra(sig: Signature) -> int:
    """The index of the epilogue's first operand."""
    params = sig.read(LinearParams)
    return 3 + (params.prologue == "rmsnorm") + params.bias


def bias_operand(sig: Signature) -> int | None:
    """The index of the bias; None if the layer has none."""
    return first_extra(sig) - 1 if sig.read(LinearParams).bias else None


def outputs(sig: Signature) -> tuple[int, ...]:
    """The indices of the output operands: this rank's first, then the peers'."""
    epilogue = sig.read(LinearParams).epilogue
    last = first_extra(sig) + EPILOGUES[epilogue].extra[0]
    each = 1 if EPILOGUES[epilogue].spread else 2 if epilogue == "sample" else 0
    return (2, *(range(last, len(sig.operands), each) if each else ()))


def candidates(sig: Signature) -> tuple[int, ...]:
    """The indices of the operands of `sample` that receive candidates: this rank's first, then each
    peer's, which follows the peer's output.
    """
    return (first_extra(sig) + 2, *(i + 1 for i in outputs(sig)[1:]))


def narrows(sig: Signature, machine: Machine) -> bool:
    """True if shared memory keeps the layer's input in the type of the weights (for example rounded
    to bf16) instead of fp32. This applies only to kernel variants with communicating warps, and to
    layers of a single input row, or of a few rows that are not given as shares of ranks.
    """
    params = sig.read(LinearParams)
    shares, rows = sig.operands[0].shape[0], sig.operands[2].shape[0]
    single = params.split_k == 1 or params.rows == 1  # a stage has no parts of several rows
    return (
        machine.variant.role(COMMUNICATE) > 0
        and (single if rows == 1 else rows == shares and is_dense(sig.operands[0]))
        and narrow_rows(rows, sig.operands[1], params.split_k)
        and (rows == 1 or params.rows in MATRIX_ROWS)
    )


def reads_from_memory(sig: Signature) -> bool:
    """True if each warp loads its part of the input directly from global memory to registers, in
    the layout of the matrix units. The input then needs no shared memory. The layer must also
    satisfy `narrows`.
    """
    params = sig.read(LinearParams)
    x, weight = sig.operands[:2]
    part = x.shape[1] // params.split_k
    return (
        1 < x.shape[0] <= MAX_UNIT_INPUT_ROWS
        and params.prologue == "none"
        and EPILOGUES[params.epilogue].spread
        and x.dtype == weight.dtype
        and x.itemsize == 2
        and not x.packet
        and (part <= MAX_HELD_INPUT_ELEMENTS or part % MAX_HELD_INPUT_ELEMENTS == 0)
    )


def narrow_rows(rows: int, weight: OperandType | Tensor, splits: int) -> bool:
    """True if the layout of shared memory for input in the weights' type (`narrows`) supports
    `rows` input rows, for weights that are split into `splits` parts along k.
    """
    kind = weight.dtype if isinstance(weight, OperandType) else weight.dtype.name
    if isinstance(by_name(kind), RowType):
        return rows == splits == 1
    part, rest = divmod(weight.shape[1], splits)
    if rows == 1:
        return not rest and kind in FLOATS and part * by_name(kind).itemsize % 16 == 0
    return not rest and rows <= MAX_UNIT_INPUT_ROWS and kind in FLOATS[1:] and part % 32 == 0


def on_units(rows: int, weight: OperandType | Tensor, machine: Machine) -> bool:
    """True if matrix units can multiply `rows` input rows by these weights. The units then load the
    input rows from global memory.
    """
    kind = weight.dtype if isinstance(weight, OperandType) else weight.dtype.name
    dense = kind == "bf16" and weight.shape[1] % UNIT_DEPTH_ELEMENTS == 0
    able = machine.variant.name == "block" and machine.has(Capability.ROWS_ON_UNITS)
    fits = (dense and able) or codes_on_units(weight, machine)
    return fits and 1 < rows <= MAX_ROWS_ON_UNITS


def codes_on_units(weight: OperandType | Tensor, machine: Machine) -> bool:
    """True if matrix units can multiply by these quantised weights. This requires that all columns
    that are multiplied at once share a scale.
    """
    dtype = by_name(weight.dtype) if isinstance(weight, OperandType) else weight.dtype
    able = machine.variant.name == "block" and machine.has(Capability.ROWS_ON_UNITS)
    fits = isinstance(dtype, RowType) and (
        dtype.groups == 1 or dtype.group % UNIT_DEPTH_ELEMENTS == 0
    )
    return fits and able


def most_of_codes(machine: Machine) -> int:
    """The most input rows for which a layer multiplies by quantised weights directly. For more
    rows, the weights are dequantised first by a separate op.
    """
    return MAX_ROWS_ON_UNITS if machine.has(Capability.ROWS_ON_UNITS) else MAX_UNIT_INPUT_ROWS


def runs_on_units(sig: Signature, machine: Machine) -> bool:
    """True if the layer's tasks use matrix units that load input rows from global memory (see
    `on_units`). Then no input rows are in shared memory.
    """
    params, rows = sig.read(LinearParams), sig.operands[2].shape[0]
    plain = params.split_k == 1 and params.epilogue != "sample"
    return plain and on_units(rows, sig.operands[1], machine)


def row_input_bytes(dtype: RowType) -> int:
    """Bytes of shared memory for one input row of a layer with quantised weights. They include a
    scale for each block of the row, and padding so that its parts begin at different banks.
    """
    blocks = -(-dtype.columns // INPUT_BLOCK_ELEMENTS)
    return narrow_bytes(1, dtype.columns, dtype.values.itemsize) + PART_BYTES + 4 * blocks


def multiplied(weight: OperandType) -> str:
    """The name of the floating-point type in which inputs are multiplied by these weights."""
    return value_type(by_name(weight.dtype)).name


def row_nbytes(weight: OperandType | Tensor) -> int:
    """Bytes of a row of weights."""
    if isinstance(weight, Tensor):
        return weight.dtype.nbytes(weight.shape[1])
    return weight.shape[1] // weight.per_item * weight.itemsize


def takes_whole(rows: int, held: int, weight: Tensor) -> bool:
    """True if matrix units multiply `rows` input rows by `held` whole rows of 16-bit weights at
    once. Each weight row is cut into four parts along k: the 16 rows of the matrix unit's tile are
    the four parts of four weight rows, and its 8 columns are for input rows.
    """
    fits = weight.dtype.itemsize == 2 and weight.shape[1] % (64 * 4) == 0
    return fits and (rows, held) == (2, 4)


def narrow_bytes(rows: int, k: int, itemsize: int) -> int:
    """Bytes of shared memory for `rows` input rows of k elements. Several rows are padded so that
    they begin at different banks.
    """
    return rows * (k * itemsize + (64 if rows > 1 else 0))


def kept_stages(warps: int, splits: int) -> int:
    """The number of stages whose sums must be kept in shared memory. Each weight row is cut along k
    into `splits` parts, one per stage, and the sums of all parts of a row are added when its last
    part is done.

    The sums of stage s overwrite those of stage s - n, where n is the returned number. This is
    safe: the warp that processed stage s - n has since taken another stage from the ring, which it
    does only after the row of stage s - n was added up.
    """
    return -(-(2 * warps + splits) // splits) * splits


def sums_bytes(warps: int, rows: int, held: int, splits: int) -> int:
    """Bytes of shared memory for a layer's sums: each warp's sums of squares and, if rows of
    weights are split along k, the sums of the parts of `held` rows and their counts.
    """
    parts = kept_stages(warps, splits) * (held * rows + 1) if splits > 1 else 0
    return 4 * (warps * rows + parts)
