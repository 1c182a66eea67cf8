"""Stores in each product's node how the product is divided into tasks: rows and columns of its
tiles, and the number of parts of k, the summed dimension. With several parts (split-k), the product
computes one partial sum per part, and an additional op adds the partial sums. The rules that choose
these numbers are in ark.lower.cuts, k_parts and thin_cuts. Listed in ark.lower.passes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from ark.ir.attributes import AddPartsAttributes, MatmulAttributes
from ark.ir.dtype import fp32, int8, int32
from ark.ir.graph import Graph, Node
from ark.log import about
from ark.lower import k_parts
from ark.lower.codes import code_cut_us, code_cuts, multiplies_codes
from ark.lower.cuts import (
    Cut,
    box_tiles,
    choose_cut,
    choose_tile,
    deals_matrices,
    fastest,
    is_exact,
)
from ark.lower.products import Product, product_of, stores_singly, travels
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.group_products import sharing
from ark.lower.rewrite.reorder_small_ops import beside
from ark.lower.thin_cuts import thin_cut
from ark.lower.window_cuts import divides_windows
from ark.machine import Machine
from ark.tasks import expression


def cut_products(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which nodes of matrix products contain their tile size and number of
    parts of k. Products whose tile the user's hints determine are not changed, nor are batches of
    matrices so small that one task computes several.
    """
    if not any(_uncut(n) for n in graph.nodes):
        return graph
    rewritten = graph.with_nodes(())
    numbers = itertools.count(1 + max(n.id for n in graph.nodes))
    working = [n for n in graph.nodes if not n.virtual]
    after = {n.id: follower for n, follower in itertools.pairwise(working)}
    shared = _shared(working)
    for node, ways in zip(graph.nodes, beside(graph.nodes, context.machines), strict=True):
        cut = None
        if _uncut(node):
            about(f"phase {graph.phases[node.phase]}")
            normed = _normed(node, after.get(node.id))
            cut = _cut(graph, product_of(node), context, ways, normed, shared[node.id])
        if cut is None:
            rewritten.nodes.append(node)
        elif cut.parts == 1:
            rewritten.nodes.append(node.with_attributes(_with_cut(node, cut)))
        else:
            rewritten.nodes += _in_parts(rewritten, node, cut, next(numbers))
    return rewritten


def _uncut(node: Node) -> bool:
    return node.type == "matmul" and node.read(MatmulAttributes).cut is None


def _shared(nodes: Sequence[Node]) -> dict[int, int]:
    """The number of consecutive products that read the same left operand, by the id of each of
    these products.
    """
    numbers: dict[int, int] = {}
    for _, run in itertools.groupby(nodes, lambda n: sharing(n) if _uncut(n) else n.id):
        listed = [n.id for n in run]
        numbers |= dict.fromkeys(listed, len(listed))
    return numbers


def _with_cut(node: Node, cut: Cut) -> MatmulAttributes:
    return structs.replace(node.read(MatmulAttributes), cut=dataclasses.astuple(cut))


def _normed(node: Node, norm: Node | None) -> bool:
    """True if the next op, `norm`, is an rmsnorm of the product's rows. Its tasks can then also add
    the partial sums of the parts of k.
    """
    out = node.outputs[0]
    return (
        norm is not None
        and (norm.type, norm.placement) == ("rmsnorm", node.placement)
        and norm.inputs[0].buffer.id == out.buffer.id
        and out.dtype == fp32
    )


def _cut(
    graph: Graph, product: Product, context: Context, ways: int, normed: bool, shared: int
) -> Cut | None:
    """The tile size and parts of k of a product; None if its node does not store them. ways: the
    number of ops that run at the same time. normed: True if an rmsnorm follows that can add the
    parts. shared: the number of consecutive products that read the same left operand.
    """
    node, machine = product.node, context.machines[product.node.phase]
    measured = context.options.get("cuts", {})
    if product.asks_tile:
        return None
    alone = node.hints is None and not travels(graph, node)
    if product.loads_boxes(machine):
        return _boxed(product, machine, measured, alone, normed, shared)
    whole = product.params
    cut = thin_cut(whole, product.tensors, machine, ways) if product.plain else None
    if cut is not None:
        return cut if alone else dataclasses.replace(cut, parts=1)
    if product.plain and deals_matrices(whole, product.tensors, machine):
        return None
    return _common(product, machine, measured, alone)


def _boxed(
    product: Product,
    machine: Machine,
    measured: Mapping[str, Sequence[int]],
    alone: bool,
    normed: bool,
    shared: int,
) -> Cut:
    """The tile size and parts of k of a product that warpgroups compute."""
    given = product.attributes
    plain = stores_singly(given)
    windows = given.windows is not None or given.pixels is not None
    flat = all(len(t.shape) <= 2 for t in product.matrices) or given.pixels is not None
    several = alone and plain and flat
    measured = {} if windows else measured  # measurements are for matrices in memory
    if multiplies_codes(product.node, machine):
        able = code_cuts(product.node, machine, several)
        if normed:
            able = [c for c in able if c.parts <= box_tiles(machine).normed_parts]

        def time(cut: Cut) -> float:
            return code_cut_us(cut, product.node, machine, normed)

        return fastest(able, time, product.shape, product.depth)
    narrow, size = given.transpose_b, product.node.inputs[0].dtype.itemsize
    if given.windows is not None and several:
        several = divides_windows(product.shape, product.depth, size, machine)
    flags = (narrow, normed, windows, plain)
    return choose_cut(
        product.shape,
        product.depth,
        size,
        machine,
        several,
        measured,
        *flags,
        beside=shared,
        heads=given.rotary,
        channels=product.node.inputs[1].shape[0] if given.pixels is not None else 0,
    )


def _common(
    product: Product, machine: Machine, measured: Mapping[str, Sequence[int]], alone: bool
) -> Cut:
    """The tile size of a product that warpgroups do not compute, and the number of parts into which
    k is split.
    """
    shape, depth, dtypes = product.shape, product.depth, product.dtypes
    if product.attributes.windows is None and k_parts.serves(dtypes, shape, machine):
        flat = product.plain and all(len(t.shape) <= 2 for t in product.tensors)
        return k_parts.choose(shape, depth, dtypes, machine, flat and alone, measured)
    block = machine.variant.name == "block"
    exact = product.plain and block and is_exact(dtypes, shape, depth, machine)
    size, heads = product.node.inputs[0].dtype.itemsize, product.attributes.rotary
    rows, columns = choose_tile(shape, depth, size, machine, measured, exact)
    return Cut(rows, max(columns // heads, 1) * heads if heads else columns)


def _in_parts(graph: Graph, node: Node, cut: Cut, number: int) -> tuple[Node, Node]:
    """Two nodes that replace a product: the product with one sum for each part of k, and the op
    that adds these sums in order and applies the product's epilogue. number: the id of the second
    node.
    """
    left, right, *others = node.inputs
    out = node.outputs[0]
    dtype = int32 if left.dtype == int8 else fp32
    sums = graph.tensor((cut.parts, *out.shape[-2:]), dtype, name=f"{node.name}.parts")
    given = _with_cut(node, cut)
    tree, finish = sum_of_parts(cut.parts), given.finish
    if finish is not None:
        leaves = [tree, *(expression.leaf(cut.parts + i) for i in range(len(others)))]
        tree = expression.substitute(finish, leaves)
    adding = dataclasses.replace(
        node,
        id=number,
        type="add_parts",
        name=f"{node.name}.sum",
        inputs=(sums, *others),
        attrs=AddPartsAttributes(expr=tree, tile=(cut.rows, cut.columns)).to_node(),
    )
    multiplying = dataclasses.replace(node, inputs=(left, right), outputs=(sums,))
    return multiplying.with_attributes(structs.replace(given, finish=None)), adding


def sum_of_parts(count: int) -> list[Any]:
    """The expression tree of the sum of the first `count` operands, in order."""
    tree = expression.leaf(0)
    for i in range(1, count):
        tree = ["add", tree, expression.leaf(i)]
    return tree
