"""Lowering of matrix products to tiles. The tiles are ordered so that consecutive tiles read common
operands, which are then in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import structs

from ark.ir.dtype import fp32, int32
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.lower.cuts import Cut, matrix_group, tiles_per_task
from ark.lower.products import Product, product_of, travels
from ark.lower.thin_cuts import is_thin
from ark.lower.tiling import box_coords, side_by_side
from ark.tasks import expression
from ark.tasks.matmul_params import MatmulParams


def lower_matmul(lowering: Lowering, node: Node) -> None:
    """Emits the tiles of a matrix product. If the kernel variant has warpgroups that support the
    product, the tiles are those of warpgroups.
    """
    product, machine = product_of(node), lowering.machine
    asked = lowering.tile(product.shape, fixed=(0, 1), shown=_shown(node))
    cut = Cut(asked[2], asked[3]) if asked else product.cut
    if product.loads_boxes(machine):
        assert cut is not None
        _lower_large(lowering, product, cut)
        return
    shape, alone = product.shape, node.hints is None and not travels(lowering.graph, node)
    tile = (cut.rows, cut.columns) if cut else (shape[2], shape[3])
    params = structs.replace(product.params, tile=tile)
    if cut and cut.parts > 1:
        places = box_coords((1, cut.parts, *shape[2:]), (1, 1, *tile))
        _emit_product(lowering, product, params, places)
        return
    if cut is None and alone:  # many products of small matrices
        params = structs.replace(params, tasks=machine.processors)
        _emit_product(lowering, product, params, [(r,) for r in range(params.tasks)])
        return
    coords: Sequence[tuple[int, ...]] = box_coords(shape, (1, 1, *tile))
    thin = product.plain and is_thin(product.params, product.tensors, machine)
    several = not thin and node.hints is None
    per_task = tiles_per_task(math.prod(tile) * product.depth, machine) if several else 1
    if len(coords) > 1 and per_task > 1:  # several small tiles per task
        params = structs.replace(params, tasks=-(-len(coords) // per_task))
        coords = [(r,) for r in range(params.tasks)]
    _emit_product(lowering, product, params, coords)


def _shown(node: Node) -> tuple[int, ...] | None:
    return node.hints.product if node.hints else None


def _emit_product(
    lowering: Lowering,
    product: Product,
    params: MatmulParams,
    coords: Sequence[tuple[int, ...]],
) -> None:
    given, (left, right, *others, out) = product.attributes, product.tensors
    if given.rotary:
        params = structs.replace(params, rotary=given.rotary, expr=given.finish)
    elif product.cut is not None and product.cut.parts > 1:
        params = structs.replace(params, splits=product.cut.parts)
    elif given.finish is not None:
        params = structs.replace(params, expr=given.finish)
    elif given.gated:
        params = structs.replace(params, gated=True)
    elif given.rope_kv is not None:
        params = structs.replace(params, **given.rope_kv.to_node())
    elif lowering.machine.variant.name == "matrix" and out.dtype not in (left.dtype, fp32, int32):
        params = structs.replace(params, expr=expression.leaf(0))  # store the sums unchanged
    lowering.emit("matmul", params, [left, right, out, *others], coords)


def _lower_large(lowering: Lowering, product: Product, cut: Cut) -> None:
    """Emits a product that warpgroups compute. The order of its tiles is such that tiles that are
    computed at the same time share data in the L2 cache.
    """
    machine, node, shape = lowering.machine, product.node, product.shape
    tile = min(cut.rows, shape[2]), cut.columns
    group = matrix_group(tile[0], product.depth, node.inputs[0].dtype.itemsize, machine)
    params = structs.replace(product.params, tile=tile)
    coords = box_coords(shape, (1, 1, *tile))
    if node.hints or travels(lowering.graph, node):
        coords.sort(key=lambda c: (*c[:2], c[2] // (group * tile[0]), c[3], c[2]))
        coords = side_by_side(coords, machine.processors)
        _emit_product(lowering, product, params, coords)
        return
    # A processor computes all its tiles in one task, so that the loads of one tile overlap with the
    # stores of the previous one.
    begin, end = node.processors or (0, machine.processors)
    tasks = min(len(coords) * cut.parts, end - begin)
    params = structs.replace(params, tasks=tasks, group=group)
    _emit_product(lowering, product, params, [(r,) for r in range(tasks)])
