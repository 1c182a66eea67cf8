"""Predicts the time of products and attention under a kernel variant from the machine's costs.
Called by ark.lower.choose for each node before anything is lowered.

Under the variant for warpgroups, which loads operands by box copies, a product takes the predicted
time of its best tiles, plus the time of copying operands that must first be rearranged. Products
that box copies cannot load, or that are too small, take the time of the device functions that all
variants have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ark.ir.attributes import MatmulAttributes
from ark.ir.dtype import bf16, fp16, fp32
from ark.ir.fold import fold
from ark.ir.graph import Graph, Node
from ark.lower.boxed import SIDES, aligned, boxes, depth_of, lies_along, wants_along
from ark.lower.codes import code_cut_us, code_cuts, multiplies_codes, unpacked_bytes
from ark.lower.cuts import box_costs, candidates, is_exact, predicted_us
from ark.lower.products import product_of, stores_singly
from ark.lower.tiling import attends
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.costs import BoxCosts
from ark.machine.variant import LOAD, Variant

# Rearranging an operand moves its bytes this number of times: they are read once and written once.
TRANSPOSED_TRAFFIC_FACTOR = 2


def boxed(variant: Variant) -> bool:
    """True if the variant's loading warp copies boxes of matrices to shared memory instead of
    streaming weights through a ring.
    """
    return bool(variant.role(LOAD)) and not variant.stages


def product_times(nodes: Sequence[Node], machine: Machine) -> list[tuple[Node, float, float]]:
    """For each product and attention: the node, its predicted microseconds under the variant for
    warpgroups, and those under the machine's first variant. Empty if the machine has no variant for
    warpgroups.
    """
    target = next((machine.using(v.name) for v in machine.variants if boxed(v)), None)
    if target is None:
        return []
    first = machine.using(machine.variants[0].name)
    share = target.warps / first.warps
    work = [n for n in nodes if n.type in ("matmul", "attention")]
    loaded = [n for n in work if n.type == "matmul" and _loads_boxes(n, target)]
    large = sum(map(_work, loaded)) >= box_costs(target).least_work
    return [(n, _work_us(n, target, share, large), _work_us(n, first)) for n in work]


def _work_us(node: Node, machine: Machine, share: float = 1.0, large: bool = False) -> float:
    """Predicted microseconds of a product or of attention under the machine's kernel variant.
    share: the speed of device functions without warpgroups in this variant, relative to their speed
    in the machine's first variant. large: True if the products that warpgroups can compute have so
    many multiplications in total that using the variant with warpgroups saves time.
    """
    costs, units = machine.costs.boxes, boxed(machine.variant)
    if costs is None:
        return 0.0
    if node.type == "attention":
        fast = units and attends(node, machine)
        return _attention_us(node, machine, costs, fast) / (1.0 if fast else share)
    if units and multiplies_codes(node, machine):
        cuts = code_cuts(node, machine, parts=True)
        return min(code_cut_us(cut, node, machine) for cut in cuts)
    high = node.outputs[0].shape[-2] >= costs.least_rows
    if units and large and high and _loads_boxes(node, machine):
        return _laid_us(node, costs) + _cut_us(node, machine)
    unpacking = unpacked_bytes(node) / costs.laid_rate
    return unpacking + _tiles_us(node, machine, costs, units) / share


def _loads_boxes(node: Node, machine: Machine) -> bool:
    """True if warpgroups compute the product, either directly or after operands that box copies
    cannot load have been copied to another layout.
    """
    return boxes(node, machine) or product_of(node).loads_boxes(machine)


def _work(node: Node) -> int:
    """The number of multiplications of a product."""
    return math.prod(node.outputs[0].shape) * depth_of(node)


def _cut_us(node: Node, machine: Machine) -> float:
    shape, size = fold(node.outputs[0].shape), node.inputs[0].dtype.itemsize
    parts, given = len(node.outputs[0].shape) <= 2, node.read(MatmulAttributes)
    depth, plain = depth_of(node), stores_singly(given)
    able = candidates(shape, depth, size, machine, parts, given.transpose_b, plain=plain)
    return min(predicted_us(cut, shape, depth, size, machine) for cut in able)


def _laid_us(node: Node, costs: BoxCosts) -> float:
    """The microseconds for copying operands that box copies cannot load to another memory layout
    (ark.lower.rewrite.align_operands); 0 if box copies can load both operands as they are.
    """
    moved = 0
    for side in SIDES:
        turned = wants_along(node) and not lies_along(node, side)
        if turned or not aligned(node.inputs[side]):
            moved += TRANSPOSED_TRAFFIC_FACTOR * node.inputs[side].nbytes
    return moved / costs.laid_rate


def _tiles_us(node: Node, machine: Machine, costs: BoxCosts, units: bool) -> float:
    """Predicted microseconds of a product that warpgroups do not compute. units: True if the kernel
    variant has warpgroups for other products. Without them, large fp32 products use a special
    device function.
    """
    shape, depth = fold(node.outputs[0].shape), depth_of(node)
    left, right = (t.dtype for t in node.inputs[:2])
    batch = math.prod(shape[:2])
    exact = is_exact([left.name, right.name], shape, depth, machine) and bool(machine.exact_tiles)
    rows, columns = unboxed_tile(node, machine)
    if left == fp32 and exact and not units:
        rate = costs.tf32_rate if node.read(MatmulAttributes).tf32 else machine.costs.exact_rate
        rows, columns = machine.exact_tile(shape[2], shape[3], depth, batch) or (rows, columns)
        high, wide = shape[2:]
        speeds = ((min(r, high), min(c, wide), s) for r, c, s in machine.exact_tiles)
        rate *= max((s for r, c, s in speeds if (r, c) == (rows, columns)), default=1.0)
    elif left in (bf16, fp16) and left == right:
        rate = costs.common_rate
    else:
        rate = costs.plain_rate
    return _rounds_us(node, machine, rate, (rows, columns))


def unboxed_us(node: Node, machine: Machine, rate: float) -> float:
    """Predicted microseconds of a product with a device function that does not use warpgroups and
    computes `rate` operations per microsecond on a processor.
    """
    return _rounds_us(node, machine, rate, unboxed_tile(node, machine))


def unboxed_tile(node: Node, machine: Machine) -> tuple[int, int]:
    """Rows and columns of the tiles of a product that does not use warpgroups."""
    shape, bits = fold(node.outputs[0].shape), node.inputs[0].dtype.bits
    return machine.matmul_tile(shape[2], shape[3], math.prod(shape[:2]), bits)


def _rounds_us(node: Node, machine: Machine, rate: float, tile: tuple[int, int]) -> float:
    shape, depth = fold(node.outputs[0].shape), depth_of(node)
    (rows, columns), batch = tile, math.prod(shape[:2])
    tiles = batch * -(-shape[2] // rows) * -(-shape[3] // columns)
    rounds = -(-tiles // machine.processors)
    return rounds * (machine.costs.task_us + 2.0 * rows * columns * depth / rate)


def _attention_us(node: Node, machine: Machine, costs: BoxCosts, fast: bool) -> float:
    operations = 4.0 * node.outputs[0].elements * node.inputs[1].shape[-2]
    rate = machine.processors * (
        costs.attention_rate if machine.has(Capability.ATTENTION_UNITS) else costs.plain_rate
    )
    return operations / (machine.tflops * 1e6 if fast else rate)


def refusal(graph: Graph, machine: Machine) -> str:
    """The reason, which names a node of the graph, why the kernel variant for warpgroups is not
    used. "" if the variant can be used, or if the machine does not have it.

    The variant is used if products and attention are predicted to take less time than under the
    machine's first variant. The prediction includes products that box copies cannot load.
    """
    target = next((machine.using(v.name) for v in machine.variants if boxed(v)), None)
    if target is None:
        return ""
    nodes = [n for n in graph.nodes if not n.virtual]
    linear = next((n.name for n in nodes if n.type == "linear"), None)
    if linear is not None:
        return f"{linear} is a linear layer of few rows"
    pairs = product_times(nodes, machine)
    if not pairs:
        return "no product and no attention"
    first = machine.variants[0]
    mine, other = sum(t for _, t, _ in pairs), sum(t for _, _, t in pairs)
    if mine < other:
        return ""
    worst, slowest_us, instead = max(pairs, key=lambda times: times[1] - times[2])
    sides = " x ".join(f"{t.dtype.name}{list(t.shape)}" for t in worst.inputs[:2])
    return (
        f"products and attention are predicted to take {mine:.1f} us, and {other:.1f} under "
        f"{first.name}; above all {worst.name}, {slowest_us:.1f} and {instead:.1f} us: {sides}"
    )
