"""Properties of a linear layer: its static parameters (ark.tasks.linear describes them), the
operands of its epilogue, whether its input is kept in the weights' type, the shared memory that it
needs, and how its weights are streamed and divided among tasks.

Used by the task kind (ark.tasks.linear), by the lowerings that choose tiles and kernel variants,
and by the backends' device functions.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ark.ir.attributes import LinearAttributes
from ark.ir.dtype import RowType, by_name, value_type
from ark.ir.epilogues import EPILOGUES, Epilogue
from ark.ir.fold import split
from ark.ir.graph import Node
from ark.ir.values import Tensor
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.variant import COMMUNICATE, COMPUTE
from ark.plan.kind import OperandType, Signature
from ark.plan.params import Epsilon, Few, Params, Splits, is_dense

FLOATS = ("fp32", "fp16", "bf16")
MAX_UNIT_INPUT_ROWS = 8  # input rows in one matrix-unit product, as its columns
MAX_HELD_INPUT_ELEMENTS = 512  # elements of an input row that a warp holds in registers at once
INPUT_BLOCK_ELEMENTS = 128  # elements of a row that share a scale, for quantised weights
PART_BYTES = 8 * 64  # bytes between the parts of an input row, for quantised weights
MAX_ROWS_ON_UNITS = 16  # with Capability.ROWS_ON_UNITS, this many input rows cost as much as one
UNIT_DEPTH_ELEMENTS = 32  # columns of weights that are processed at once with ROWS_ON_UNITS
MATRIX_ROWS = (16, 8, 4, 2)  # weight rows in a stage for matrix units, with several input rows
MAX_PROCESSORS_PER_TASK = 3  # at least one in this many processors gets a task of a layer
MAX_INPUT_ROWS = 8  # most input rows of a layer whose rows of weights are cut along k
MATRIX_UNIT_BYTES = 64  # bytes of a row that matrix units multiply at once
MATRIX_UNIT_ROWS = 16  # rows of weights that matrix units multiply at once
MIN_QUANTIZED_STAGE_ROWS = 2  # of quantised weights, even if warps are idle

StageRows = Annotated[int, msgspec.Meta(ge=1, le=64)]


class LinearParams(Params, frozen=True):
    rows: StageRows
    split_k: Splits
    prologue: Literal["none", "rmsnorm"]
    epilogue: Epilogue
    eps: Epsilon | None = None
    bias: bool = False
    heads: Few = 0
    kv_heads: Few = 0
    head_dim: Few = 0
    tiles: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    shares: Splits = 1
    share: Annotated[int, msgspec.Meta(ge=0, le=1 << 12)] = 0
    ranks: Splits = 1
    first: Annotated[int, msgspec.Meta(ge=0, le=1 << 12)] = 0


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


def stage_rows(weight: Tensor, machine: Machine, paired: bool) -> int:
    """The number of rows of weights in one stage, which is a slot of the ring in shared memory
    through which weights are streamed. It is a power of two that fits, at most 4 (more for
    quantised weights), and at least 2 if an epilogue reads pairs of rows (`paired`).
    """
    rows, most = 2 if paired else 1, 4
    if isinstance(weight.dtype, RowType) and machine.ring_bytes:
        most = min(max(most, machine.costs.stage_codes // weight.shape[1]), MATRIX_UNIT_ROWS)
        each = weight.shape[0] // (machine.processors * machine.variant.role(COMPUTE))
        most = min(most, max(each, MIN_QUANTIZED_STAGE_ROWS))
    while 2 * rows <= most and 2 * rows * row_nbytes(weight) <= machine.stage_bytes:
        rows *= 2
    return rows


def input_in_memory(node: Node) -> bool:
    """True if matrix units read the input of a linear layer of few rows directly from memory
    (ark.tasks.linear.reads_from_memory).
    """
    given = node.read(LinearAttributes)
    plain = given.prologue == "none" and not EPILOGUES[given.epilogue].paired
    return plain and node.inputs[0].dtype == node.inputs[1].dtype


def stage_tile(node: Node, machine: Machine) -> tuple[int, int]:
    """How the weights of a linear layer are streamed through the ring in shared memory. Returns the
    number of rows of weights that are loaded together, and the number of stages (slots of the ring)
    that they take. They take more than one stage if rows are divided along k.

    In kernel variants with communicating warps, matrix units multiply inputs of few rows, and as
    many rows of weights are loaded together as a matrix unit multiplies at once. For an input of
    two rows, whole rows are loaded.
    """
    x, weight, out = *node.inputs[:2], node.outputs[0]
    rows, paired = out.shape[0], EPILOGUES[node.read(LinearAttributes).epilogue].paired
    few = machine.variant.role(COMMUNICATE) and 1 < rows <= MAX_INPUT_ROWS and x.shape[0] == rows
    unit = row_nbytes(weight) // MATRIX_UNIT_BYTES
    held = stage_rows(weight, machine, paired)
    if few and not input_in_memory(node) and takes_whole(rows, held, weight):
        return held, 1
    if (
        not few
        or row_nbytes(weight) % MATRIX_UNIT_BYTES
        or weight.dtype.itemsize != 2
        or not x.dense
    ):
        return stage_rows(weight, machine, paired), split_k(rows, weight, machine)
    # Each row of a stage takes a separate copy, which delays the operand stream. So a stage has
    # only as many rows of weights as one matrix instruction multiplies (16 if each warp reads the
    # input from memory itself).
    held = MATRIX_ROWS[0 if input_in_memory(node) else 1]
    parts = (p for p in range(1, unit + 1) if unit % p == 0)
    room = (p for p in parts if held * row_nbytes(weight) <= p * machine.stage_bytes)
    return held, next(room, unit)


def layer_tiles(node: Node, machine: Machine) -> tuple[int, int, list[tuple[int, int]]]:
    """How a linear layer is divided into tasks. Returns the number of rows of weights that are
    loaded together, the number of stages that they take (see stage_tile), and for each task the
    number of its first row of weights and of the row after its last.
    """
    weight = node.inputs[1]
    n = weight.shape[0]
    rows, splits = stage_tile(node, machine)
    shares = dealt(node.outputs[0].shape[0], weight, machine)
    parts = split(-(-n // rows), shares)
    return rows, splits, [(a * rows, min(b * rows, n)) for a, b in parts]


def split_k(rows: int, weight: Tensor, machine: Machine) -> int:
    """The number of stages (slots of the ring in shared memory) that a row of weights takes; 0 if
    the weights cannot be streamed. rows: the number of input rows.

    A row that fits in a stage takes one stage. A wider row is divided along k into equal parts, one
    for each stage. In variants without communicating warps, a row can be divided only if the input
    has one row. Each thread keeps a slice of this row, with an even number of elements, in
    registers.
    """
    columns = weight.shape[1]
    if not machine.ring_bytes or row_nbytes(weight) <= machine.stage_bytes:
        return 1
    if isinstance(weight.dtype, RowType):
        return 0
    if machine.variant.role(COMMUNICATE):
        # In variants with communicating warps, different warps multiply the parts of a row of
        # weights, and each finds the input in shared memory. So there may be several input rows, at
        # most MAX_INPUT_ROWS.
        least = -(-row_nbytes(weight) // machine.stage_bytes) if rows <= MAX_INPUT_ROWS else 0
        unit = 16 if rows == 1 else 64  # a part is a multiple of this many bytes
        units = row_nbytes(weight) // unit
        fits = (p for p in range(least, units + 1) if least and units % p == 0)
        return next(fits, 0) if row_nbytes(weight) % unit == 0 else 0
    share, rest = divmod(columns, machine.lanes * machine.warps)
    if rows != 1 or rest or share > machine.row_slice:
        return 0
    least = -(-row_nbytes(weight) // machine.stage_bytes)
    return next((p for p in range(least, share) if share % (2 * p) == 0), 0)
