"""Copies operands of matrix products to other memory layouts, if matrix units cannot read them as
they are or would read them more slowly. Listed in ark.lower.passes; runs after the kernel variant
is chosen.

Warpgroups read operands by box copies (hardware copies of rectangles), which need rows that start
at multiples of 16 bytes. An operand with unaligned rows is copied to aligned rows, which costs one
more read. If an elementwise op or a product computes the operand for this product only, later
passes fuse the copy into that op (fuse_chains, fuse_epilogues). For some types (8-bit types, fp32
as tf32) matrix units need the summed dimension k to be contiguous; operands with another layout are
transposed in memory.

Products of fp32 in full precision (in tiles of Machine.exact_tiles) can read unaligned rows, but
only element by element. Such an operand is copied if the product is predicted to gain more time
than the copy takes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence, Set

from ark.ir.attributes import MatmulAttributes
from ark.ir.fold import fold
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.boxed import (
    MIN_MATRIX_UNIT_ROWS,
    SIDES,
    aligned,
    boxes,
    depth_of,
    lies_along,
    wants_along,
)
from ark.lower.cuts import is_exact
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fold_transposes import reading_turned
from ark.lower.rewrite.odd_rows import padded_rows
from ark.machine import Machine
from ark.plan.types import BOX_ALIGNMENT_BYTES


def align_operands(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which operands of products are copied to layouts that matrix units can
    read, or read faster. Operands whose rows will be padded where they are (pad_rows) stay.
    """
    if context.machine.variant.name not in LAID:
        return graph
    return lay_out(graph, context, padded_rows(graph, context))


def lay_out(graph: Graph, context: Context, spared: Set[int] = frozenset()) -> Graph:
    """A copy of the graph with the operands of products copied. spared: ids of the buffers of
    operands that are not copied to aligned rows.
    """
    laid = LAID.get(context.machine.variant.name)
    if laid is None:
        return graph
    number = max((n.id for n in graph.nodes), default=0)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.type == "matmul":
            for side in SIDES:
                before = laid(graph, node, side, number + 1, context.machine, spared)
                if before is not None:
                    number += 1
                    nodes.append(before)
                    node = _reading(node, side, before)
        nodes.append(node)
    return graph.with_nodes(nodes)


def _laid(
    graph: Graph, product: Node, side: int, number: int, machine: Machine, spared: Set[int]
) -> Node | None:
    """A node that copies or transposes operand `side` (0 or 1) of a product; None if warpgroups can
    read the operand as it is. number: the id of the new node.
    """
    source = product.inputs[side]
    if product.outputs[0].shape[-2] < MIN_MATRIX_UNIT_ROWS and product.inputs[1].shape[:-2]:
        return None  # a batch of matrices, each of which is read only once
    if wants_along(product) and not lies_along(product, side):
        rank = len(source.shape)
        order = [*range(rank - 2), rank - 1, rank - 2]
        out = _rows_aligned(graph, [source.shape[d] for d in order], source, product)
        return product.beside(number, "transpose", [source], out, {"perm": order})
    if aligned(source) or source.buffer.id in spared or not boxes(product, machine):
        return None
    out = _rows_aligned(graph, source.shape, source, product)
    return product.beside(number, "copy", [source], out, {})


def _laid_in_vectors(
    graph: Graph, product: Node, side: int, number: int, machine: Machine, spared: Set[int]
) -> Node | None:
    """A node that copies operand `side` (0 or 1) of an fp32 product to aligned rows; None if the
    product would not gain more time than the copy takes.
    """
    costs, source, shape = machine.costs, product.inputs[side], fold(product.outputs[0].shape)
    depth, types = depth_of(product), [t.dtype.name for t in product.inputs[:2]]
    exact = bool(machine.exact_tiles) and is_exact(types, shape, depth, machine)
    if (
        aligned(source)
        or source.buffer.id in spared
        or not exact
        or product.read(MatmulAttributes).tf32
    ):
        return None
    product_us = 2.0 * math.prod(shape) * depth / (costs.exact_rate * machine.processors)
    waits_us = costs.task_us + costs.signal_us + costs.each_signal_us * machine.processors
    copy_us = waits_us + 2 * source.nbytes / (machine.bandwidth_gbps * 1e3)
    if costs.unaligned_share * product_us <= copy_us:
        return None
    out = _rows_aligned(graph, source.shape, source, product)
    return product.beside(number, "copy", [source], out, {})


def _rows_aligned(graph: Graph, shape: Sequence[int], source: Tensor, product: Node) -> Tensor:
    """A tensor of the given shape with its rows aligned for box copies."""
    alignment = BOX_ALIGNMENT_BYTES // source.dtype.itemsize
    rows = (*shape[:-1], -(-shape[-1] // alignment) * alignment)
    return graph.tensor(shape, source.dtype, extents=rows, name=f"{product.name}.laid")


def _reading(product: Node, side: int, laid: Node) -> Node:
    source = laid.outputs[0]
    if laid.type == "transpose":
        return reading_turned(product, side, source)
    inputs = (*product.inputs[:side], source, *product.inputs[side + 1 :])
    return dataclasses.replace(product, inputs=inputs)


# For each kernel variant that has a rule: the copy of an operand, or the operand itself.
LAID = {"matrix": _laid, "block": _laid_in_vectors}
