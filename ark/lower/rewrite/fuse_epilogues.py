"""Fuses an elementwise op that reads the result of a matmul, or of a convolution in groups with
channels last, into this op. The elementwise op (a bias, residual, activation, scale or cast)
becomes an epilogue: an expression that is applied to the sums before they are stored. So the result
without the epilogue is neither written nor read. Intermediate values are fp32, as in fused chains.

In a gated layer, the epilogue computes silu(gate) * up from two neighbouring columns. In a
projection to queries, keys and values, it rotates pairs of columns and stores the results at their
destinations, without writing them as fp32 before.

To products this applies only if their body supports expressions: under the variant `matrix`, on
machines whose matrix units are used in any variant (`k_parts`; pairs only for products that are not
faster in parts of k), on machines with one thread per processor, and for products of fp32 on both
sides, which the vendor-independent body computes on every machine. It does not apply under the
variant `roles`, since such a kernel has not been run on a GPU.

The elementwise op may read the product in another shape (rows by batch, or pixels as an image). Its
other operands are then viewed in the product's shape. Listed in ark.lower.passes after chains are
fused.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from msgspec import structs

from ark.backend.codegen.layout import RECORD_OPERANDS
from ark.ir.attributes import GroupedAttributes, MatmulAttributes, ProjectionAttributes
from ark.ir.dtype import FLOATS, SMALL_FLOATS, RowType, bf16, fp16, fp32
from ark.ir.epilogues import GATED_PAIRS
from ark.ir.fold import fold
from ark.ir.graph import Graph, Node
from ark.ir.graph_view import WritesSoFar
from ark.ir.values import Tensor
from ark.lower import k_parts
from ark.lower.boxed import MIN_MATRIX_UNIT_ROWS, depth_of
from ark.lower.products import product_of
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_chains import read_once
from ark.lower.rewrite.views import same_elements, seen_in
from ark.lower.work_times import unboxed_tile, unboxed_us
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.tasks import expression
from ark.tasks.node_expressions import expression_of, is_elementwise
from ark.tasks.sequences import MAX_BATCH

HEAD_SLAB_COLUMNS = 64  # columns of one head that are stored at a time after matrix units
ENDED = ("matmul", "depthwise", "grouped_convolution")  # types of nodes that may get an epilogue
MAX_EPILOGUE_OPERANDS = RECORD_OPERANDS - 5  # besides the product's operands and their two box maps


def fuse_epilogues(graph: Graph, context: Context) -> Graph:
    """A copy of the graph with elementwise nodes fused into products."""
    machine, kept = context.machine, context.kept
    if machine.variant.name == "roles":
        return graph
    matrix, units = machine.variant.name == "matrix", machine.has(Capability.K_PARTS)
    everywhere = matrix or units or machine.has(Capability.ONE_PRODUCT_BODY)
    private = read_once(graph, kept)
    products: dict[int, tuple[int, Node]] = {}  # by buffer: index and node
    written = WritesSoFar()
    number = max((n.id for n in graph.nodes), default=0)
    nodes: list[Node | None] = []
    ahead: dict[int, list[Node]] = defaultdict(list)  # by index: products to insert before
    for place, node in enumerate(graph.nodes):
        if is_elementwise(node):
            candidates = [
                (t, *products[t.buffer.id]) for t in node.inputs if t.buffer.id in products
            ]
            if candidates:
                read, at, product = max(candidates, key=lambda f: f[1])
                others = [f for f in candidates if f[2] is not product]
                stale = written.behind(at, product.inputs)
                seen = None if stale else _seen(product, node, read)
                if others and seen is not None and not _fits(product, seen, read):
                    # A node that reads several products can become the epilogue of only one of
                    # them, the last. Each of the other products first gets, as its epilogue, the
                    # part of the node that depends on its result.
                    for tensor, place_of, other in others:
                        split = not written.behind(place_of, other.inputs)
                        parts = _split(graph, other, node, tensor, number + 1) if split else None
                        if parts is None:
                            continue
                        number, (ended, node) = number + 1, parts
                        nodes[place_of] = None
                        ahead[place].append(ended)
                    seen = _seen(product, node, read)
                if seen is not None and _fits(product, seen, read):
                    nodes[at] = None
                    node = _join(product, seen, read)
                    if private(node.outputs[0]):  # its reader may be fused, too
                        products[node.outputs[0].buffer.id] = (place, node)
        elif node.type in PAIRS and (matrix or units) and _is_product(node.inputs[0], products):
            at, product = products[node.inputs[0].buffer.id]
            stale = written.behind(at, product.inputs)
            plain = product.type == "matmul" and _finish_of(product) is None
            plain = plain and (matrix or _stays_whole(product, machine))
            if plain and not stale and PAIRS[node.type](product, node, matrix):
                nodes[at] = None
                given = product.read(MatmulAttributes)
                if node.type in GATED_PAIRS.values():
                    given = structs.replace(given, gated=True)
                else:
                    given = structs.replace(given, rope_kv=node.read(ProjectionAttributes))
                node = dataclasses.replace(
                    product,
                    id=node.id,
                    inputs=(*product.inputs, *node.inputs[1:]),
                    outputs=node.outputs,
                    attrs=given.to_node(),
                    after=(*product.after, *node.after),
                )
        elif _takes_epilogue(node) and not (matrix and _slower_with_epilogue(node, machine)):
            out = node.outputs[0]
            if private(out) and (everywhere or node.type != "matmul" or _scalar(node)):
                products[out.buffer.id] = (place, node)
        written.add(place, node)
        nodes.append(node)
    ordered = (n for place, node in enumerate(nodes) for n in (*ahead[place], node))
    return graph.with_nodes(n for n in ordered if n is not None)


def _stays_whole(product: Node, machine: Machine) -> bool:
    """True if matrix units compute the product with undivided sums over k as fast as with k in
    several parts (split-k).
    """
    dtypes, shape = [t.dtype.name for t in product.inputs[:2]], fold(product.outputs[0].shape)
    return k_parts.serves(dtypes, shape, machine) and k_parts.stays_whole(
        shape, depth_of(product), dtypes, machine
    )


def _takes_epilogue(node: Node) -> bool:
    """True for a product, or a convolution in groups, that has no epilogue yet and may get one."""
    return node.type in ENDED and _finish_of(node) is None and not node.hints


def _slower_with_epilogue(node: Node, machine: Machine) -> bool:
    """True for a product that box copies cannot load, if a separate op after it is predicted to be
    faster than an epilogue. With an epilogue such a product does not use matrix units.
    """
    costs = machine.costs.boxes
    if node.type != "matmul" or costs is None or product_of(node).loads_boxes(machine):
        return False
    if min(unboxed_tile(node, machine)) < MIN_MATRIX_UNIT_ROWS or _scalar(node):
        return False
    units = unboxed_us(node, machine, costs.common_rate)
    alone = machine.costs.task_us + machine.costs.signal_us
    return unboxed_us(node, machine, costs.plain_rate) > units + alone


def _finish_of(node: Node) -> expression.Tree | None:
    """The epilogue of a product or of a convolution in groups, as an expression tree; None if it
    has none.
    """
    if node.type == "matmul":
        return node.read(MatmulAttributes).finish
    return node.read(GroupedAttributes).finish


def _scalar(node: Node) -> bool:
    """True for a product of fp32 tensors only. No machine's matrix units multiply these exactly."""
    return all(t.dtype.name == "fp32" for t in (*node.inputs, *node.outputs))


def _is_product(tensor: Tensor, products: dict[int, tuple[int, Node]]) -> bool:
    """True if the tensor is the result of one of the given products and has the product's shape."""
    product = products.get(tensor.buffer.id)
    return product is not None and product[1].outputs[0].id == tensor.id


def _seen(product: Node, node: Node, read: Tensor) -> Node | None:
    """A copy of the elementwise node in which all operands are viewed in the product's shape; None
    if that is not possible. read: the input of the node that is the product's result.
    """
    between = product.outputs[0]
    if read.shape != node.outputs[0].shape:
        return None
    if read.id == between.id and read.shape == between.shape:
        return node
    return seen_in(node, between.shape) if same_elements(read, between) else None


def _fits(product: Node, node: Node, read: Tensor) -> bool:
    between, out = product.outputs[0], node.outputs[0]
    return (
        product.placement == node.placement
        and not node.hints
        and between.shape == out.shape
        and out.dtype in (*FLOATS, *SMALL_FLOATS)
        and not any(t.dtype.packed for t in node.inputs)
        and not expression.places(expression_of(node))
        and len({t.id for t in (*product.inputs[2:], *node.inputs)}) <= MAX_EPILOGUE_OPERANDS
        and expression.size(_ends(product, node, read)[0]) <= expression.MAX_NODES
        # The fused result must not overwrite an operand of the product, because other tiles still
        # read the operand's rows and columns.
        and out.buffer.id not in {t.buffer.id for t in product.inputs}
    )


def _gates(product: Node, node: Node, matrix: bool) -> bool:
    """True if the product's epilogue can compute silu(gate) * up from each pair of neighbouring
    columns.
    """
    out = node.outputs[0]
    return (
        product.placement == node.placement
        and not node.hints
        and len(product.inputs[0].shape) == len(product.inputs[1].shape) == 2
        and product.outputs[0].shape[1] >= 64
        and out.dtype in FLOATS
        and out.dense
        and out.shape[1] % 8 == 0
        and out.buffer.id not in {t.buffer.id for t in product.inputs}
    )


def _rotates(product: Node, node: Node, matrix: bool) -> bool:
    """True where the product's epilogue can rotate queries and keys and append keys and values.
    This requires caches of a 16-bit type, and rows of one sequence or, in the variant `matrix`, a
    tile with a row of each sequence. There the queries must have the caches' type.
    """
    query, position, caches = node.outputs[0], node.inputs[1], node.inputs[3:5]
    rows = query.shape[0]
    one = len(node.outputs) == 1 < rows and position.shape == (1,)
    each = matrix and len(node.outputs) == 2 and position.shape == (rows,) and rows <= MAX_BATCH
    each = each and not isinstance(product.inputs[1].dtype, RowType)
    return (
        product.placement == node.placement
        and not node.hints
        # A page table may follow the caches among the inputs, if each thread looks up the pages of
        # its own row.
        and ((one and len(node.inputs) == 5) or each)
        and len(product.inputs[0].shape) == len(product.inputs[1].shape) == 2
        and all(t.dtype in (bf16, fp16) for t in caches)
        and all(t.dtype == query.dtype or (query.dtype == fp32 and not matrix) for t in caches)
        and node.read(ProjectionAttributes).head_dim % HEAD_SLAB_COLUMNS == 0
        and not node.read(ProjectionAttributes).head_eps
        and not {t.buffer.id for t in (*node.outputs, *caches)}
        & {t.buffer.id for t in product.inputs}
    )


PAIRS = {**dict.fromkeys(GATED_PAIRS.values(), _gates), "rope_kv": _rotates}
"""Ops that compute a result from two neighbouring columns of a product. For each, the function that
decides whether the op can become the product's epilogue.
"""


def _ends(product: Node, node: Node, read: Tensor) -> tuple[expression.Tree, list[Tensor]]:
    """The epilogue that a product has after it is fused with the node, as an expression tree, and
    the operands that the epilogue reads besides the product's result.
    """
    before = _finish_of(product) or expression.leaf(0)
    others = list(product.inputs[2:])
    others += [t for t in dict.fromkeys(node.inputs) if t.id != read.id and t not in others]
    leaves = [
        before if t.id == read.id else expression.leaf(1 + others.index(t)) for t in node.inputs
    ]
    return expression.substitute(expression_of(node), leaves), others


def _split(
    graph: Graph, product: Node, node: Node, read: Tensor, number: int
) -> tuple[Node, Node] | None:
    """Splits an elementwise node that reads several products. Returns one product fused with the
    part of the expression that depends only on it and on small tensors, and the node for the rest
    of the expression. None if there is no such part or the product cannot take it. number: the id
    of the new node.
    """
    inputs, tree = node.inputs, node.elementwise.expr
    if tree is None:
        return None
    place = next(i for i, t in enumerate(inputs) if t.id == read.id)
    small = frozenset(i for i, t in enumerate(inputs) if t.elements < read.elements)
    part = expression.own_part(tree, place, small)
    if part is None or part is tree or part[0] == "input" or read.shape != node.outputs[0].shape:
        return None
    # The reader computes in the type of a cast. The result that is stored for it has another type.
    if expression.has_casts(part):
        return None
    operands = sorted(expression.reads(part))
    result = graph.tensor(read.shape, read.dtype, name=product.name)
    leaves = [
        expression.leaf(operands.index(i) if i in operands else 0) for i in range(len(inputs))
    ]
    attrs = {"expr": expression.substitute(part, leaves)}
    first = node.beside(
        number, node.type, (inputs[i] for i in operands), result, attrs, waits=False
    )
    seen = _seen(product, first, read)
    if seen is None or not _fits(product, seen, read):
        return None
    rest = expression.replaced(tree, part, expression.leaf(place))
    kept = sorted({*expression.reads(rest), place})
    leaves = [expression.leaf(kept.index(i) if i in kept else 0) for i in range(len(inputs))]
    second = dataclasses.replace(
        node,
        inputs=tuple(result if i == place else inputs[i] for i in kept),
        attrs={"expr": expression.substitute(rest, leaves)},
    )
    return _join(product, seen, read), second


def _join(product: Node, node: Node, read: Tensor) -> Node:
    tree, others = _ends(product, node, read)
    inputs, attrs = (*product.inputs[:2], *others), {**product.attrs, "finish": tree}
    members = (product, node)
    return node.fused(product.type, inputs, node.outputs, attrs, members, product.name)
