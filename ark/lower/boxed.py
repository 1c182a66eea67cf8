"""Decides from data types, sizes and memory layout which matrix products warpgroups compute. A
warpgroup is a set of warps that issue one matrix instruction together (`wgmma`). Its operands are
loaded by box copies: hardware copies of a rectangle of a matrix to shared memory (TMA). Called
before the kernel variant is chosen, and by the passes that arrange operands for box copies.
"""

from __future__ import annotations

from ark.ir.attributes import MatmulAttributes
from ark.ir.dtype import SMALL_FLOATS, bf16, fp16, int8
from ark.ir.fold import MAX_FOLDED_DIMS
from ark.ir.graph import Node
from ark.ir.values import Tensor
from ark.lower.cuts import box_costs, box_tiles
from ark.lower.tiling import start_of
from ark.machine import Machine
from ark.plan.types import BOX_ALIGNMENT_BYTES
from ark.tasks.matmul_params import PixelParams
from ark.tasks.matmul_pixels import matrix_shape

MIN_MATRIX_UNIT_ROWS = 9  # the fewest rows of a product for which a matrix unit pays off
SIDES = (0, 1)
ALONG = (False, True)  # for the left and the right side: the transpose flag if k is contiguous


def boxes(node: Node, machine: Machine) -> bool:
    """True if warpgroups should compute this product. Matrix units must support its types, and its
    result must be large enough. Box copies must be able to load both operands. If they cannot load
    an operand, it must first be copied to aligned rows; this pays off only if each of its elements
    is multiplied many times.
    """
    out, full = node.outputs[0], box_tiles(machine).least_rows
    return (
        len(out.shape) <= MAX_FOLDED_DIMS
        and out.shape[-1] >= machine.large_product[1]
        and (out.shape[-2] >= full or out.shape[-1] >= 2 * full)
        and _unit_types(node)
        and all(aligned(node.inputs[i]) or _read_often(node, i, machine) for i in SIDES)
    )


def aligned(tensor: Tensor) -> bool:
    """True if all rows of the tensor begin at multiples of BOX_ALIGNMENT_BYTES, as box copies
    require.
    """
    size = tensor.dtype.itemsize
    return all(
        s * size % BOX_ALIGNMENT_BYTES == 0 for s in (*tensor.strides[:-1], start_of(tensor))
    )


def wants_along(node: Node) -> bool:
    """True if matrix units need k, the summed dimension, to be contiguous in memory for the
    product's types.
    """
    return node.inputs[0].dtype.bits == 8 or node.read(MatmulAttributes).tf32


def lies_along(node: Node, side: int) -> bool:
    """True if k, the summed dimension, is contiguous in memory in one operand of a product. side: 0
    for the left operand, 1 for the right one.
    """
    return node.read(MatmulAttributes).transposes[side] == ALONG[side]


def depth_of(node: Node) -> int:
    """The size of k, the dimension over which a product sums."""
    given = node.read(MatmulAttributes)
    if given.pixels is not None:
        left, right = (t.shape for t in node.inputs[:2])
        return matrix_shape(left, right, PixelParams.from_plan(given.pixels), 0)[1]
    return node.inputs[0].shape[-2 if node.read(MatmulAttributes).transpose_a else -1]


def _read_often(node: Node, side: int, machine: Machine) -> bool:
    return node.outputs[0].shape[-1 - (side == 1)] >= box_costs(machine).least_reads


def _unit_types(node: Node) -> bool:
    """True if warpgroups multiply the operands' types: bf16, fp16, 8-bit floats, int8, or fp32 as
    tf32.
    """
    left, right = (t.dtype for t in node.inputs[:2])
    if left in (bf16, fp16):
        return all(t.dtype == left for t in (*node.inputs, *node.outputs))
    small = left in SMALL_FLOATS and right in SMALL_FLOATS
    return small or left == right == int8 or node.read(MatmulAttributes).tf32
