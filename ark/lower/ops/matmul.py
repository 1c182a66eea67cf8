"""Matrix products to tile tasks: which body takes one, in which tiles, in how many parts of k."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import structs

from ark.ir.dtype import fp32, int8, int32
from ark.ir.fold import FOLDED, fold
from ark.ir.graph import Node
from ark.ir.values import Tensor as IrTensor
from ark.lower import k_parts
from ark.lower.boxed import SIDES, aligned, depth_of, lies_along, wants_along
from ark.lower.context import Lowering
from ark.lower.cuts import (
    Cut,
    candidates,
    choose_cut,
    choose_tile,
    deals_matrices,
    is_exact,
    matrix_group,
    tiles_together,
)
from ark.lower.merge import join, joins, part, widen
from ark.lower.parts import ADDED, is_normed, sum_of_parts
from ark.lower.registry import get
from ark.lower.rewrite.overlap_collectives import SHARE, SUM
from ark.lower.thin_cuts import thin_cut
from ark.lower.tiling import box_coords, side_by_side
from ark.tasks import expression
from ark.tasks.matmul_params import MatmulParams, WindowParams
from ark.tasks.pointwise import PointwiseParams


def lower_matmul(lowering: Lowering, node: Node) -> None:
    """Tiles of a product, by the variant's own bodies where they take it."""
    tensors = [*node.inputs, *node.outputs]
    if len(node.outputs[0].shape) > FOLDED:
        tensors = _merge_batch(tensors)
    machine = lowering.machine
    shape = fold(tensors[-1].shape)
    if node.attrs.get("gated"):
        shape = (*shape[:3], 2 * shape[3])
    elif "rope_kv" in node.attrs:
        shape = (*shape[:3], node.inputs[1].shape[-2 if node.attrs["transpose_b"] else -1])
    if machine.variant.name == "matrix" and _loads_boxes(node, tensors, shape):
        _lower_large(lowering, node, tensors, shape)
        return
    asked = lowering.tile(shape, fixed=(0, 1), shown=_shown(node))
    plain = not any(node.attrs.get(name) for name in ("gated", "rope_kv", "windows"))
    cut = thin = None
    product = _product(node, shape)
    if plain and not asked:
        cut = thin = thin_cut(product, tensors, machine, lowering.beside)
    dealt_out = plain and not asked and deals_matrices(product, tensors, machine)
    if asked:
        tile = asked[2], asked[3]
    elif dealt_out:
        tile = shape[2], shape[3]
    else:
        cut = thin or _usual_cut(lowering, node, tensors, shape, plain)
        tile = cut.rows, cut.columns
    params = structs.replace(product, tile=tile)
    if cut and cut.parts > 1 and not node.hints and not _travels(lowering, node):
        places = box_coords((1, cut.parts, *shape[2:]), (1, 1, *tile))
        _emit_parts(lowering, node, params, tensors, places, cut)
        return
    coords: Sequence[tuple[int, ...]] = box_coords(shape, (1, 1, *tile))
    if dealt_out and node.hints is None and not _travels(lowering, node):
        params = structs.replace(params, tasks=machine.processors)
        _emit_product(lowering, node, params, tensors, [(r,) for r in range(params.tasks)])
        return
    several = not thin and node.hints is None
    together = tiles_together(math.prod(tile) * _depth(node), machine) if several else 1
    if len(coords) > 1 and together > 1:  # several small ones are a task
        params = structs.replace(params, tasks=-(-len(coords) // together))
        coords = [(r,) for r in range(params.tasks)]
    _emit_product(lowering, node, params, tensors, coords)


def _usual_cut(
    lowering: Lowering,
    node: Node,
    tensors: Sequence[IrTensor],
    shape: Sequence[int],
    plain: bool,
) -> Cut:
    """The cut of a product that warpgroups do not take. plain: its sums are stored one by one."""
    machine, measured = lowering.machine, lowering.options.get("cuts", {})
    depth, dtypes = _depth(node), [t.dtype.name for t in node.inputs[:2]]
    if "windows" not in node.attrs and k_parts.serves(dtypes, shape, machine):
        flat = plain and all(len(t.shape) <= 2 for t in tensors)
        parts = flat and not node.hints and not _travels(lowering, node)
        return k_parts.choose(shape, depth, dtypes, machine, parts, measured)
    exact = plain and machine.variant.name == "block" and is_exact(dtypes, shape, depth)
    size = node.inputs[0].dtype.itemsize
    return Cut(*choose_tile(shape, depth, size, machine, measured, exact))


def _loads_boxes(node: Node, tensors: Sequence[IrTensor], shape: Sequence[int]) -> bool:
    """Can warpgroups take the product.

    Is it as wide as their tiles, of types of theirs, and do the rows of both sides begin where
    boxes may? Others have the common bodies beside them.
    """
    if any(node.attrs.get(name) for name in ("windows", "gated", "rope_kv")):
        return True
    left, right, *_, out = tensors
    narrow, size = bool(node.attrs["transpose_b"]), left.dtype.itemsize
    return (
        len(out.shape) <= FOLDED
        and bool(candidates(shape, _depth(node), size, False, narrow))
        and (left.dtype != fp32 or bool(node.attrs.get("tf32")))
        and (not wants_along(node) or all(lies_along(node, side) for side in SIDES))
        and left.dtype.bits == right.dtype.bits
        and aligned(left)
        and aligned(right)
    )


def _depth(node: Node) -> int:
    """Elements of k."""
    if "windows" in node.attrs:
        return node.inputs[1 - node.attrs["windows"]["side"]].shape[-1]
    return depth_of(node)


def _shown(node: Node) -> tuple[int, ...] | None:
    return node.hints.product if node.hints else None


def _product(node: Node, shape: Sequence[int]) -> MatmulParams:
    """A product's parameters, whose only tile is all of its shape."""
    windows = node.attrs.get("windows")
    return MatmulParams(
        transpose_a=bool(node.attrs["transpose_a"]),
        transpose_b=bool(node.attrs["transpose_b"]),
        tile=(shape[2], shape[3]),
        tf32=bool(node.attrs.get("tf32")),
        windows=None if windows is None else WindowParams.from_plan(windows),
    )


def _emit_product(
    lowering: Lowering,
    node: Node,
    params: MatmulParams,
    tensors: Sequence[IrTensor],
    coords: Sequence[tuple[int, ...]],
) -> None:
    left, right, *others, out = tensors
    if "finish" in node.attrs:
        params = structs.replace(params, expr=node.attrs["finish"])
    elif node.attrs.get("gated"):
        params = structs.replace(params, gated=True)
    elif "rope_kv" in node.attrs:
        params = structs.replace(params, **node.attrs["rope_kv"])
    elif lowering.machine.variant.name == "matrix" and out.dtype not in (left.dtype, fp32, int32):
        params = structs.replace(params, expr=expression.leaf(0))  # the sums as they are
    lowering.emit("matmul", params, [left, right, out, *others], coords)


def _lower_large(
    lowering: Lowering, node: Node, tensors: Sequence[IrTensor], shape: Sequence[int]
) -> None:
    """For warpgroups: tiles in an order that shares L2, parts of k where tiles are few.

    shape: the product's.
    """
    machine, a = lowering.machine, node.inputs[0]
    depth = _depth(node)
    asked = lowering.tile(shape, fixed=(0, 1), shown=_shown(node))
    alone = not node.hints and not _travels(lowering, node)
    if asked:
        cut = Cut(asked[2], asked[3])
    else:
        plain = "gated" not in node.attrs and "rope_kv" not in node.attrs
        several = alone and plain and all(len(t.shape) <= 2 for t in tensors)
        windows = "windows" in node.attrs
        measured = {} if windows else lowering.options.get("cuts", {})  # of matrices in memory
        narrow = bool(node.attrs["transpose_b"])
        size, normed = a.dtype.itemsize, is_normed(lowering, node)
        cut = choose_cut(shape, depth, size, machine, several, measured, narrow, normed, windows)
    tile = min(cut.rows, shape[2]), cut.columns
    group = matrix_group(tile[0], depth, a.dtype.itemsize, machine)
    params = structs.replace(_product(node, shape), tile=tile)
    coords = box_coords(shape, (1, 1, *tile))
    if not alone:
        coords.sort(key=lambda c: (*c[:2], c[2] // (group * tile[0]), c[3], c[2]))
        coords = side_by_side(coords, machine.processors)
        _emit_product(lowering, node, params, tensors, coords)
        return
    # A processor's tiles are one task: it loads one while it stores another.
    begin, end = node.processors or (0, machine.processors)
    tasks = min(len(coords) * cut.parts, end - begin)
    params = structs.replace(params, tasks=tasks, group=group)
    coords = [(r,) for r in range(tasks)]
    if cut.parts == 1:
        _emit_product(lowering, node, params, tensors, coords)
        return
    _emit_parts(lowering, node, params, tensors, coords, cut)


def _travels(lowering: Lowering, node: Node) -> bool:
    """Does a peer wait for what it makes, or it for a peer?

    Its tiles are tasks of their own then: each leaves when it is done.
    """
    if lowering.graph.world_size == 1:
        return False
    made = {t.buffer.id for t in node.outputs}
    read = {t.buffer.id for t in node.inputs}
    return any(
        (entry.all_ranks or entry.names_ranks)
        and (
            (other.type not in (SUM, SHARE) and any(t.buffer.id in made for t in other.inputs))
            or any(t.buffer.id in read for t in other.outputs)
        )
        for other in lowering.graph.nodes
        if not other.virtual
        for entry in (get(other.type),)
    )


def _emit_parts(
    lowering: Lowering,
    node: Node,
    params: MatmulParams,
    tensors: Sequence[IrTensor],
    coords: Sequence[tuple[int, ...]],
    cut: Cut,
) -> None:
    """The product as parts of k, each a matrix of sums, which are added up."""
    left, right, *others, out = tensors
    whole = int32 if left.dtype == int8 else fp32
    sums = lowering.temp((cut.parts, *out.shape[-2:]), whole, f"{node.name}.parts")
    params = structs.replace(params, splits=cut.parts)
    lowering.emit("matmul", params, [left, right, sums], coords)
    _add_parts(lowering, node, sums, others, out, cut)


def _add_parts(
    lowering: Lowering,
    node: Node,
    sums: IrTensor,
    others: Sequence[IrTensor],
    out: IrTensor,
    cut: Cut,
) -> None:
    """Adds the parts of a product up, in order, and does what follows it.

    A tile's parts are added by as many tasks as made them.
    """
    parts, m, n = sums.shape
    views = [part(sums, 0, i, 1) for i in range(parts)]
    tree = sum_of_parts(parts)
    if "finish" in node.attrs:
        leaves = [tree, *(expression.leaf(parts + i) for i in range(len(others)))]
        tree = expression.substitute(node.attrs["finish"], leaves)
    wide = [widen(t, 3) if len(t.shape) < 3 else t for t in (*others, out)]
    tile = (1, 1, -(-min(cut.rows, m) // parts), min(cut.columns, n))
    coords = box_coords(fold(wide[-1].shape), tile)
    params = PointwiseParams(tree, tile)
    lowering.emit("pointwise", params, [*views, *wide], coords, ADDED)


def _merge_batch(tensors: Sequence[IrTensor]) -> list[IrTensor]:
    """The operands with as few batch dimensions as their memory allows."""
    found = [widen(t, len(tensors[-1].shape)) for t in tensors]
    for d in range(len(found[-1].shape) - 4, -1, -1):
        wanted = found[-1].shape[d : d + 2]
        matching = all(t.shape[d : d + 2] in (wanted, (1, 1)) for t in found)
        if matching and all(joins(t, d) for t in found):
            found = [join(t, d) for t in found]
    return found
