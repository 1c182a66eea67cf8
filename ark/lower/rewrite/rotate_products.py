"""Fuses rotary embeddings into the products that compute queries and keys. The epilogue of the
product rotates the sums of both halves of a head, so that unrotated values are neither stored nor
read.

Before this pass, ark.lower.rewrite.fuse_rotary has rewritten such an embedding as two elementwise
nodes, one for each half of the heads. These nodes become the product's epilogue if no other node
reads the product's result. The cosines and sines are two tables of a row per position; a product's
rows may be those of several sequences. Both halves of a head must have the same cosines and sines,
as concatenations of a tensor with itself.

Warpgroups have both columns of a pair in registers of one thread if a tile consists of whole heads
(ark.lower.cuts). Machines with one thread per processor have a tile's sums in memory. Other bodies
of products pass a few columns at a time to the epilogue, without the other half of a head; on these
machines the halves stay elementwise nodes. Listed in ark.lower.passes after bias has been fused.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import structs

from ark.ir.attributes import AxisAttributes, MatmulAttributes
from ark.ir.dtype import FLOATS, bf16, fp16
from ark.ir.fold import fold
from ark.ir.graph import Graph, Node
from ark.ir.graph_view import WritesSoFar
from ark.ir.values import Tensor
from ark.lower.boxed import boxes, depth_of
from ark.lower.cuts import candidates, predicted_us
from ark.lower.products import product_of
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_epilogues import HEAD_SLAB_COLUMNS, MAX_EPILOGUE_OPERANDS
from ark.lower.rewrite.fuse_rotary import FIRST, SECOND
from ark.lower.rewrite.group_products import sharing
from ark.lower.rewrite.makers import only_makers
from ark.lower.rewrite.views import in_shape, same_elements, whole
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.tasks import expression
from ark.tasks.matmul_text import MIN_PACKED_ROWS
from ark.tasks.node_expressions import expression_of, is_elementwise


@dataclasses.dataclass(frozen=True)
class _Halves:
    """Two elementwise nodes that rotate the halves of heads. rows: the tensor that the nodes read.
    result: the tensor that they write, in the same shape (..., heads, width). cosines, sines:
    tensors that broadcast to this shape.
    """

    rows: Tensor
    cosines: Tensor
    sines: Tensor
    result: Tensor


def rotate_products(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which products rotate queries and keys."""
    machine = context.machine
    able = machine.has(Capability.WGMMA) or machine.has(Capability.TCGEN05)
    boxed = machine.variant.name == "matrix" and able
    if not boxed and not machine.has(Capability.ONE_PRODUCT_BODY):
        return graph
    touching, makers, written = graph.view.touching, only_makers(graph), WritesSoFar()
    shared = Counter(sharing(n) for n in graph.nodes if n.type == "matmul")
    products: dict[int, tuple[int, Node]] = {}  # by buffer: index and node
    nodes: list[Node | None] = []
    for place, node in enumerate(graph.nodes):
        halves = _halves(graph.nodes[place - 1], node) if place else None
        if halves is not None and halves.rows.buffer.id in products:
            before, (at, product) = graph.nodes[place - 1], products[halves.rows.buffer.id]
            members = {product.id, before.id, node.id}
            alone = touching[halves.rows.buffer.id] == members
            steady = not written.behind(at, product.inputs)
            fused = None
            if alone and steady and (boxed or _in_memory(product)):
                fused = _join(graph, makers, product, before, node, halves)
            if boxed and fused is not None:
                beside = shared[sharing(product)]
                fused = fused if _pays(product, fused, machine, beside) else None
            if fused is not None:
                nodes[at] = nodes[-1] = None
                node = fused
        elif node.type == "matmul" and _takes(node, context.kept):
            products[node.outputs[0].buffer.id] = (place, node)
        written.add(place, node)
        nodes.append(node)
    if None not in nodes:
        return graph
    return graph.with_nodes(n for n in nodes if n is not None)


def _takes(node: Node, kept: frozenset[int]) -> bool:
    """True for a product of two matrices whose epilogue may also rotate halves of heads. Its result
    must not be read from outside of the graph.
    """
    given, out = node.read(MatmulAttributes), node.outputs[0]
    return (
        product_of(node).plain
        and given.cut is None
        and node.hints is None
        and all(len(t.shape) == 2 for t in (*node.inputs[:2], out))
        and all(t.dtype in FLOATS for t in (*node.inputs, out))
        and len(node.inputs) <= MAX_EPILOGUE_OPERANDS
        and out.buffer.arena == "activation"
        and out.buffer.id not in kept
    )


def _halves(first: Node, second: Node) -> _Halves | None:
    """The rotary embedding of heads that two consecutive nodes compute, one for each half; None if
    they do not compute one.
    """
    ends = ((first, FIRST), (second, SECOND))
    for node, tree in ends:
        if node.type != "elementwise" or len(node.inputs) != 4 or node.hints is not None:
            return None
        types = [t.dtype.name for t in node.inputs]
        if node.elementwise.expr != expression.typed(tree, types, node.outputs[0].dtype.name):
            return None
    low, high = (node.inputs for node in (first, second))
    rows, crossed = _joined(low[0], high[0]), _joined(high[2], low[2])
    cosines, sines = _joined(low[1], high[1]), _joined(low[3], high[3])
    result = _joined(first.outputs[0], second.outputs[0])
    if None in (rows, crossed, cosines, sines, result) or first.placement != second.placement:
        return None
    assert rows and crossed and cosines and sines and result
    fits = rows.shape == result.shape and _same(rows, crossed) and whole(result)
    return _Halves(rows, cosines, sines, result) if fits else None


def _joined(low: Tensor, high: Tensor) -> Tensor | None:
    """The tensor whose last dimension is the last dimension of `low` followed by that of `high`.
    None if low and high are not neighbouring halves of a buffer's rows.
    """
    width = low.shape[-1]
    beside = (*low.offsets[:-1], low.offsets[-1] + width)
    shape = (*low.shape[:-1], 2 * width)
    like = (low.buffer.id, low.dtype, low.shape, low.extents)
    if (high.buffer.id, high.dtype, high.shape, high.extents) != like or high.offsets != beside:
        return None
    return dataclasses.replace(low, shape=shape, padded=shape)


def _same(a: Tensor, b: Tensor) -> bool:
    """True if both tensors are the same elements of a buffer in the same shape."""
    first, second = (dataclasses.replace(t, id=0, name="", padded=()) for t in (a, b))
    return first == second


def _join(
    graph: Graph,
    makers: Mapping[int, Node],
    product: Node,
    first: Node,
    second: Node,
    halves: _Halves,
) -> Node | None:
    """The node `product`, with the nodes `first` and `second`, which rotate its result, as its
    epilogue. None if a row of the product does not consist of whole heads, or if the cosines and
    sines depend on more than a row's position. makers: see only_makers.
    """
    out, shape = product.outputs[0], halves.rows.shape
    rows, columns = out.shape
    width = shape[-1]
    wide = len(shape) > 2 and shape[-2] * width == columns
    if not wide or not same_elements(halves.rows, out) or halves.result.dtype != out.dtype:
        return None
    tables = [_table(graph, makers, t, shape) for t in (halves.cosines, halves.sines)]
    result = _viewed(graph, halves.result, (rows, columns))
    apart = halves.result.buffer.id not in {
        t.buffer.id for t in (*product.inputs, halves.cosines, halves.sines)
    }
    if result is None or None in tables or not apart or len({t.shape for t in tables if t}) > 1:
        return None
    given = structs.replace(product.read(MatmulAttributes), rotary=width)
    return dataclasses.replace(
        product,
        id=second.id,
        inputs=(*product.inputs, *(t for t in tables if t is not None)),
        outputs=(result,),
        attrs=given.to_node(),
        after=(*product.after, *first.after, *second.after),
    )


def _table(
    graph: Graph, makers: Mapping[int, Node], tensor: Tensor, shape: Sequence[int]
) -> Tensor | None:
    """A view of cosines or sines as a table (rows, width / 2). `tensor` broadcasts to `shape`,
    (..., heads, width), whose dimensions (...) number the product's rows. Row r of the product has
    row r modulo `rows` of the table. None if there is no such view, or if both halves of a row are
    not known to be equal.
    """
    sizes = (1,) * (len(shape) - len(tensor.shape)) + tensor.shape
    lead, given, width = shape[:-2], sizes[:-2], shape[-1]
    repeated = next((d for d, n in enumerate(given) if n != 1), len(given))
    if sizes[-2:] != (1, width) or tuple(given[repeated:]) != tuple(lead[repeated:]):
        return None
    view = _viewed(graph, tensor, (math.prod(given), width))
    if view is None or not _repeats(makers, view):
        return None
    half = (view.shape[0], width // 2)
    return graph.tensor_like(
        dataclasses.replace(view, shape=half, padded=half), view.buffer, view.name
    )


def _repeats(makers: Mapping[int, Node], tensor: Tensor) -> bool:
    """True if both halves of the last dimension are known to be equal."""
    node, width = makers.get(tensor.buffer.id), tensor.shape[-1]
    if node is None or len(node.outputs) != 1 or node.outputs[0].shape[-1] != width:
        return False
    if not same_elements(tensor, node.outputs[0]):
        return False
    if node.type == "concat":
        axis = node.read(AxisAttributes).axis % len(node.outputs[0].shape)
        joined = len(node.inputs) == 2 and _same(*node.inputs)
        return joined and axis == len(node.outputs[0].shape) - 1
    if not is_elementwise(node) or expression.places(expression_of(node)):
        return False
    return all(t.shape[-1:] in ((), (1,)) or _repeats(makers, t) for t in node.inputs)


def _viewed(graph: Graph, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
    view = in_shape(tensor, shape, named=True)
    return None if view is None else graph.tensor_like(view, view.buffer, view.name)


def _in_memory(product: Node) -> bool:
    """True if the product has enough rows that, on a machine with one thread per processor, its
    device function packs both operands before it multiplies. The sums of a tile are then in memory.
    """
    return product.outputs[0].shape[0] >= MIN_PACKED_ROWS


def _pays(product: Node, fused: Node, machine: Machine, shared: int) -> bool:
    """True if warpgroups can rotate the sums, and the product with this epilogue is predicted to
    take no longer than the product and the two nodes. shared: the number of products that read the
    same left operand.
    """
    width, out = fused.read(MatmulAttributes).rotary, product.outputs[0]
    beside, tables = product.inputs[2:], fused.inputs[-2:]
    if (
        out.dtype not in (bf16, fp16)
        or any(t.dtype not in (bf16, fp16) for t in tables)
        or any(t.elements > out.shape[1] for t in beside)
        or width % HEAD_SLAB_COLUMNS
        or not boxes(product, machine)
        or not product_of(product).loads_boxes(machine)
    ):
        return False
    shape, depth, size = fold(out.shape), depth_of(product), out.dtype.itemsize
    narrow, costs = product.read(MatmulAttributes).transpose_b, machine.costs

    def least(parts: bool, heads: int) -> float:
        able = candidates(shape, depth, size, machine, parts, narrow, plain=True, heads=heads)
        times = (predicted_us(c, shape, depth, size, machine, beside=shared) for c in able)
        return min(times, default=math.inf)

    alone = 2 * (costs.task_us + costs.signal_us)  # tasks of the two nodes, one after the other
    return least(False, width) <= least(True, 0) + alone
