"""Products of a few rows with quantised weights on the matrix units of the variant `matrix`, whose
device functions read the codes (stored integers or small floats) and dequantise them in registers.
Decides which products these are, and how they are divided.

Called by ark.lower.rewrite.unpack_rows, which dequantises the weights of all others, and by the
modules that predict and choose cuts.
"""

from __future__ import annotations

import itertools
import math

from ark.ir.attributes import MatmulAttributes
from ark.ir.dtype import RowType, bf16, fp16, fp32
from ark.ir.graph import Node
from ark.lower.boxed import MIN_MATRIX_UNIT_ROWS
from ark.lower.cuts import Cut, box_costs, box_tiles
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.tasks.matmul_codes import MAX_ROWS, STAGE_DEPTH, part_fits, served, stage_bytes

ROWS = range(MIN_MATRIX_UNIT_ROWS, MAX_ROWS + 1)


def multiplies_codes(node: Node, machine: Machine) -> bool:
    """True where matrix units multiply a product's rows by the codes of a quantised weight, under
    one of the machine's variants.
    """
    if node.type != "matmul" or not isinstance(node.inputs[1].dtype, RowType):
        return False
    (x, weight), dtype = node.inputs[:2], node.inputs[1].dtype
    return (
        machine.has(Capability.CODE_BOXES)
        and any(v.name == "matrix" for v in machine.variants)
        and node.hints is None
        and node.read(MatmulAttributes).transposes == (False, True)
        and len(x.shape) == len(weight.shape) == 2
        and x.shape[0] in ROWS
        and x.dtype in (fp32, dtype.values)
        and dtype.values in (bf16, fp16)
        and weight.dense
        and any(columns <= weight.shape[0] for _, columns in box_tiles(machine).codes)
        and served(dtype)
    )


def code_cuts(node: Node, machine: Machine, parts: bool) -> list[Cut]:
    """The cuts of a product with codes of a quantised weight. parts: True if k may be split."""
    weight, tiles = node.inputs[1], box_tiles(machine)
    counts = (1, *(tiles.parts if parts else ()))
    steps = -(-weight.shape[1] // STAGE_DEPTH)
    return [
        Cut(*tile, many)
        for tile, many in itertools.product(tiles.codes, counts)
        if tile[1] <= weight.shape[0] and many <= steps and part_fits(weight.shape[1], many)
    ]


def code_cut_us(cut: Cut, node: Node, machine: Machine, normed: bool = False) -> float:
    """The approximate microseconds of a product with codes; only comparisons between cuts are
    meaningful. normed: see ark.lower.cuts.predicted_us.
    """
    (x, weight), costs, dtype = node.inputs[:2], box_costs(machine), node.inputs[1].dtype
    assert isinstance(dtype, RowType)
    (rows, k), columns = x.shape, weight.shape[0]
    tiles = -(-columns // cut.columns) * cut.parts
    step = max(
        stage_bytes(dtype, rows, cut.columns) / costs.small_load_rate,
        cut.columns * STAGE_DEPTH / costs.code_rate,
        costs.least_step_us,
    )
    fold = 0.0
    if cut.parts > 1:
        moved = 8.0 * cut.parts * rows * columns
        fold = costs.normed_us if normed else costs.fold_us + costs.each_part_us * cut.parts
        fold += max(0.0, moved - costs.kept_bytes) / costs.fold_rate
    steps = math.ceil(-(-k // STAGE_DEPTH) / cut.parts)
    return -(-tiles // machine.processors) * (steps * step + costs.tile_us) + fold


def unpacked_bytes(node: Node) -> int:
    """Bytes that are read and written if a product's weight is dequantised first; 0 if it is not
    quantised.
    """
    weight = node.inputs[1]
    if not isinstance(weight.dtype, RowType):
        return 0
    return weight.nbytes + weight.dtype.values.nbytes(weight.elements)
