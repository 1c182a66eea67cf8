"""Decides which products of a few rows with quantised weights run on the matrix units of the kernel
variant `matrix`, and how they are divided into tasks. The device functions of these products read
the codes of the weights (stored integers or small floats) and dequantise them in registers. All
other quantised weights are dequantised by ark.lower.rewrite.unpack_rows before their product.
Called by that pass, and by the modules that predict and choose cuts.
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
    """True if matrix units of one of the machine's kernel variants can multiply the rows of this
    product by the codes of its quantised weight.
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
    """The cuts (tile sizes and numbers of parts of k) for a product with the codes of a quantised
    weight. parts: True if k may be divided.
    """
    weight, tiles = node.inputs[1], box_tiles(machine)
    counts = (1, *(tiles.parts if parts else ()))
    steps = -(-weight.shape[1] // STAGE_DEPTH)
    return [
        Cut(*tile, many)
        for tile, many in itertools.product(tiles.codes, counts)
        if tile[1] <= weight.shape[0] and many <= steps and part_fits(weight.shape[1], many)
    ]


def code_cut_us(cut: Cut, node: Node, machine: Machine, normed: bool = False) -> float:
    """The approximate microseconds of a product with codes of a quantised weight, for comparing
    cuts. normed: True if a norm reads the rows of the result; see ark.lower.cuts.predicted_us.
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
    """The bytes that are read and written if a product's weight is dequantised to memory before the
    product; 0 if the weight is not quantised.
    """
    weight = node.inputs[1]
    if not isinstance(weight.dtype, RowType):
        return 0
    return weight.nbytes + weight.dtype.values.nbytes(weight.elements)
