"""Lets convolutions read their windows directly from the image (implicit GEMM).

Front ends write a convolution as a product with a matrix of windows (ark.ops.windows), because most
matrix units read matrices. Computing this matrix takes one more op, and the matrix is larger than
the image by a factor of the number of elements of a window (9 for 3 x 3). This pass removes the
matrix in two cases. If no matrix unit supports the product, a device function without matrix units
reads the image directly. If box copies can load windows (capability `window_boxes`), they load
images with channels last (ark.lower.rewrite.channels_last) directly. For products of fp32 with
special tiles (Machine.exact_tiles) the matrix remains, because it is worth its cost. Listed in
ark.lower.passes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from ark.ir.attributes import MatmulAttributes, RemapAttributes
from ark.ir.fold import fold
from ark.ir.graph import Graph, Node
from ark.ir.graph_view import WritesSoFar
from ark.ir.values import Tensor
from ark.lower.boxed import MIN_MATRIX_UNIT_ROWS, depth_of
from ark.lower.cuts import is_exact
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_chains import read_once
from ark.lower.rewrite.views import whole
from ark.lower.window_cuts import window_cuts
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.tasks.matmul_params import WindowParams
from ark.tasks.matmul_text import MIN_PACKED_ROWS as PACKED_ROWS
from ark.tasks.matmul_windows import boxable, matrix_shape


def fuse_windows(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which convolutions read windows from the image where that is faster
    than from a matrix of windows.
    """
    machine, kept = context.machine, context.kept
    private = read_once(graph, kept)
    windows: dict[int, tuple[int, Node]] = {}  # by buffer: index and node
    written = WritesSoFar()
    nodes: list[Node | None] = []
    for place, node in enumerate(graph.nodes):
        if node.type == "remap" and private(node.outputs[0]) and whole(node.outputs[0]):
            windows[node.outputs[0].buffer.id] = (place, node)
        elif node.type == "matmul":
            for side in (1, 0):
                at, before = windows.get(node.inputs[side].buffer.id, (-1, node))
                if at < 0 or written.behind(at, before.inputs[:1]):
                    continue
                joined = _joined(before, node, side, machine)
                if joined is not None:
                    nodes[at] = None
                    node = joined
                    break
        written.add(place, node)
        nodes.append(node)
    return graph.with_nodes(n for n in nodes if n is not None)


def _joined(windows: Node, product: Node, side: int, machine: Machine) -> Node | None:
    """One node that replaces two: the node that computes a matrix of windows, and the product that
    reads the matrix. None if there is no such node. side: the operand of the product (0 or 1) that
    is the matrix.
    """
    if machine.variant.name == "matrix":
        boxed = _boxed(windows, product, side, machine)
        if boxed is not None or product.outputs[0].shape[-2] >= MIN_MATRIX_UNIT_ROWS:
            return boxed
    return _unboxed(windows, product, machine) if side == 1 else None


def _unboxed(windows: Node, product: Node, machine: Machine) -> Node | None:
    """A convolution node that replaces the matrix of windows and the product, and does not use
    matrix units. None if the product does not have the form of a convolution, or a matrix unit
    supports it.
    """
    weight, table, *others = product.inputs
    if windows.placement != product.placement or windows.hints or product.hints:
        return None
    if not whole(table) or not whole(weight) or len(table.shape) != 4 or len(weight.shape) != 4:
        return None
    n, groups, depth, places = table.shape
    rows = weight.shape[2]
    if weight.shape != (1, groups, rows, depth):
        return None
    given = product.read(MatmulAttributes)
    if given.transposes != (False, False) or given.gated:
        return None
    alone = machine.has(Capability.ONE_PRODUCT_BODY)
    served = alone or not _scalar(product) or _exact(product, depth, machine)
    if rows >= (PACKED_ROWS if alone else MIN_MATRIX_UNIT_ROWS) and served:
        return None
    convolution = window(windows, groups)
    if (
        convolution is None
        or math.prod(convolution["sizes"]) != places
        or windows.inputs[0].shape[0] != n
    ):
        return None
    attrs = convolution if given.finish is None else {**convolution, "finish": given.finish}
    return dataclasses.replace(
        product,
        type="convolution",
        inputs=(weight, windows.inputs[0], *others),
        attrs=attrs,
        after=(*windows.after, *product.after),
    )


def _exact(product: Node, depth: int, machine: Machine) -> bool:
    """True if the machine has special tiles for this product of fp32."""
    types = [t.dtype.name for t in product.inputs[:2]]
    shape = fold(product.outputs[0].shape)
    return bool(machine.exact_tiles) and is_exact(types, shape, depth, machine)


def _scalar(node: Node) -> bool:
    return all(t.dtype.name == "fp32" for t in (*node.inputs[:2], *node.outputs))


def _boxed(windows: Node, product: Node, side: int, machine: Machine) -> Node | None:
    """A product that replaces the matrix of windows and its reader, and loads windows by box copies
    from the image. None if box copies cannot load these windows, or channels are not last.
    """
    source, table, weight = windows.inputs[0], product.inputs[side], product.inputs[1 - side]
    if not machine.has(Capability.WINDOW_BOXES) or windows.placement != product.placement:
        return None
    given = product.read(MatmulAttributes)
    if windows.hints or product.hints or given.gated or given.rope_kv is not None:
        return None
    if given.transposes != (False, True):
        return None
    if not all(map(whole, (source, table, weight))):
        return None
    if source.dtype.itemsize != 2 and not given.tf32:
        return None
    window = window_of_last(windows, side)
    if window is None:
        return None
    if not boxable(source.shape, source.strides, source.dtype.itemsize, window):
        return None
    if table.shape != matrix_shape(source.shape, window):
        return None
    shape, size = fold(product.outputs[0].shape), source.dtype.itemsize
    if not window_cuts(shape, depth_of(product), size, machine):
        return None
    inputs = (source, weight) if side == 0 else (weight, source)
    return dataclasses.replace(
        product,
        inputs=(*inputs, *product.inputs[2:]),
        attrs=structs.replace(given, windows=window.to_plan()).to_node(),
        after=(*windows.after, *product.after),
    )


def window_of_last(node: Node, side: int) -> WindowParams | None:
    """The parameters of the windows that a node computes from an image with channels last, as (n,
    places..., taps..., channels); None if the node computes something else. side: the index of the
    product's operand that is the matrix of windows.
    """
    source: Tensor = node.inputs[0]
    count = len(source.shape) - 2
    given = node.read(RemapAttributes)
    shape, rules = given.shape, given.rules
    if not 1 <= count <= 2 or len(shape) != 2 + 2 * count or len(rules) != 2 + count:
        return None
    if [shape[0], shape[-1]] != [source.shape[0], source.shape[-1]] or given.fill:
        return None
    if rules[0] != [[[0, 1]], 0, 1, "fill"] or rules[-1] != [[[1 + 2 * count, 1]], 0, 1, "fill"]:
        return None
    steps = steps_of(rules[1:-1], 1 + count, 1)
    sizes = {"size": shape[1 + count : -1], "sizes": shape[1 : 1 + count]}
    return None if steps is None else WindowParams.from_plan({**sizes, **steps, "side": side})


def window(node: Node, groups: int) -> dict[str, Any] | None:
    """The parameters of the windows that a node computes from an image with channels first: size,
    stride, dilation, padding and number of places. None if the node's index arithmetic is not that
    of a convolution.
    """
    source: Tensor = node.inputs[0]
    count = len(source.shape) - 2
    given = node.read(RemapAttributes)
    shape, rules = given.shape, given.rules
    each = source.shape[1] // groups if groups and source.shape[1] % groups == 0 else 0
    lead = [source.shape[0], groups, each]
    if not 1 <= count <= 2 or len(shape) != 3 + 2 * count or list(shape[:3]) != lead:
        return None
    if given.fill or rules[0] != [[[0, 1]], 0, 1, "fill"]:
        return None
    if rules[1] != [[[1, each], [2, 1]], 0, 1, "fill"]:
        return None
    steps = steps_of(rules[2:], 3, 3 + count)
    sizes = {"size": list(shape[3 : 3 + count]), "sizes": list(shape[3 + count :])}
    return None if steps is None else {**sizes, **steps}


def steps_of(rules: Sequence[Any], tap: int, place: int) -> dict[str, list[int]] | None:
    """Stride, dilation and leading padding of a convolution, for each spatial dimension, read from
    the index arithmetic of its windows. None if the arithmetic is not that of a convolution. tap,
    place: the index of the first dimension of taps, and of places, in the matrix of windows.
    """
    steps: list[tuple[int, int, int]] = []
    for d, (terms, add, divide, _) in enumerate(rules):
        if divide != 1 or add > 0 or [t[0] for t in terms] != [tap + d, place + d]:
            return None
        (_, spread), (_, step) = terms
        if spread < 1 or step < 1:
            return None
        steps.append((step, spread, -add))
    stride, dilation, before = (list(each) for each in zip(*steps, strict=True))
    return {"stride": stride, "dilation": dilation, "before": before}
