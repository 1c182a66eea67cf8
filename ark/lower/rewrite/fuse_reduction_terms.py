"""Fuses an elementwise op into the reduction that reads its result. The reduction then computes the
terms that it adds, such as squares, products or differences from a mean, as it reads the op's
inputs. Intermediate values are fp32, as in fused chains. If only a cast reads a reduction's result,
the reduction stores it in the type of the cast. If many threads compute a task, two reductions of
the same columns then become one.

Listed in ark.lower.passes after the pass that fuses chains of elementwise ops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from msgspec import structs

from ark.errors import PlanError
from ark.ir.attributes import ReduceAttributes
from ark.ir.dtype import FLOATS, INTEGERS, fp32
from ark.ir.fold import MAX_FOLDED_DIMS
from ark.ir.graph import Graph, Node
from ark.ir.graph_view import WritesSoFar
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_chains import read_once
from ark.lower.rewrite.join_reductions import join_reductions
from ark.lower.rewrite.views import in_shape, same_elements, seen_in
from ark.tasks import expression
from ark.tasks.node_expressions import expression_of, is_elementwise
from ark.tasks.reduce import MAX_FULL_TERM_INPUTS

FUNCTIONS = ("sum", "mean", "max", "min", "prod", "squares", "logsumexp")
REDUCTIONS = tuple(f"reduce_{f}" for f in FUNCTIONS)
MAX_COLUMN_NUMBERS = 4  # inputs with one element per result; a thread keeps them in registers


def fuse_reduction_terms(graph: Graph, context: Context) -> Graph:
    """A copy of the graph with elementwise nodes fused into reductions."""
    kept = context.kept
    private = read_once(graph, kept, repeated_inputs=True)
    makers: dict[int, tuple[int, Node]] = {}  # by buffer: index and node
    sums: dict[int, tuple[int, Node]] = {}  # the same for reductions
    written = WritesSoFar()
    nodes: list[Node | None] = []
    for place, node in enumerate(graph.nodes):
        if is_elementwise(node) and private(node.outputs[0]):
            makers[node.outputs[0].buffer.id] = place, node
        elif node.type in REDUCTIONS and node.inputs[0].buffer.id in makers:
            at, before = makers[node.inputs[0].buffer.id]
            joined = None if written.behind(at, before.inputs) else _joined(before, node)
            if joined is not None:
                nodes[at], node = None, joined
        if node.inputs and node.inputs[0].buffer.id in sums:
            at, before = sums[node.inputs[0].buffer.id]
            cast = None if written.behind(at, before.inputs) else _cast(before, node)
            if cast is not None:
                nodes[at], node = None, cast
        if node.type in REDUCTIONS and private(node.outputs[0]):
            sums[node.outputs[0].buffer.id] = place, node
        written.add(place, node)
        nodes.append(node)
    fused = graph.with_nodes(n for n in nodes if n is not None)
    return join_reductions(fused) if context.machine.cooperative else fused


def _cast(before: Node, node: Node) -> Node | None:
    """The reduction `before` with the result of the node, if that casts the reduction's result to
    another floating-point type; otherwise None.
    """
    total, out = before.outputs[0], node.outputs[0]
    if (
        not is_elementwise(node)
        or expression_of(node) != ["cast", out.dtype.name, expression.leaf(0)]
        or total.dtype != fp32
        or out.dtype not in FLOATS
        or before.placement != node.placement
        or before.hints
        or node.hints
        or not same_elements(node.inputs[0], total)
    ):
        return None
    result = in_shape(out, total.shape, named=True)
    return None if result is None else dataclasses.replace(before, outputs=(result,))


def _joined(before: Node, node: Node) -> Node | None:
    """The two nodes fused into one reduction; None if they cannot be fused."""
    read, out = node.inputs[0], node.outputs[0]
    alike = before.placement == node.placement and not before.hints and not node.hints
    if not alike or len(node.inputs) > 1 or not same_elements(read, before.outputs[0]):
        return None
    # The inputs of the elementwise op may be viewed in other shapes, because the lowering of the
    # reduction views all inputs in its own dimensions in any case.
    seen = seen_in(before, read.shape, named=True)
    if seen is None or len(read.shape) > MAX_FOLDED_DIMS:
        return None
    given = node.read(ReduceAttributes)
    deep, flat = _parted(seen.inputs, read.shape, given.axis)
    if not deep or len(deep) + len(flat) < len({t.id for t in seen.inputs}):
        return None
    inputs = (*deep, *flat)
    number = {t.id: i for i, t in enumerate(inputs)}
    leaves = [expression.leaf(number[t.id]) for t in seen.inputs]
    tree = expression.substitute(expression_of(seen), leaves)
    fits = expression.reads(tree) == frozenset(range(len(inputs)))
    beside = expression.indices(tree) - {given.axis - len(read.shape)}
    if expression.places(tree) and (seen is not before or beside):
        return None  # the expression computes with element indices, which differ in another shape
    if not fits or _kind(tree, inputs) not in _kinds(node):
        return None
    if out.buffer.id in {t.buffer.id for t in inputs}:
        return None
    return dataclasses.replace(
        node,
        inputs=inputs,
        attrs=structs.replace(given, term=tree).to_node(),
        after=(*before.after, *node.after),
    )


def _parted(
    inputs: Sequence[Tensor], shape: Sequence[int], axis: int
) -> tuple[list[Tensor], list[Tensor]]:
    """The inputs of an elementwise op, divided into those with all elements and those with size 1
    along the reduced axis. Two empty lists if a reduction does not support these inputs: there are
    too many, or those with all elements differ in layout or have unsupported types.
    """
    deep: dict[int, Tensor] = {}
    flat: dict[int, Tensor] = {}
    for tensor in inputs:
        wide = (1,) * (len(shape) - len(tensor.shape)) + tensor.shape
        if tensor.shape == tuple(shape) and shape[axis] > 1:
            deep[tensor.id] = tensor
        elif wide[axis] == 1 and tensor.dtype in FLOATS:
            flat[tensor.id] = tensor
    first = next(iter(deep.values()), None)
    alike = first is not None and all(
        t.dtype in (*FLOATS, *INTEGERS) and t.strides == first.strides for t in deep.values()
    )
    few = len(deep) <= MAX_FULL_TERM_INPUTS and len(flat) <= MAX_COLUMN_NUMBERS
    return (list(deep.values()), list(flat.values())) if alike and few else ([], [])


def _kind(tree: expression.Tree, inputs: Sequence[Tensor]) -> str:
    """The name of the type of the expression's value; "" if the expression is not valid for these
    inputs.
    """
    try:
        return expression.check(tree, [t.dtype.name for t in inputs], len(inputs[0].shape))
    except PlanError:
        return ""


def _kinds(node: Node) -> tuple[str, ...]:
    """The types that a fused expression may have: only the type in which the reduction computes
    now. Empty for a reduction of bool.
    """
    stored = expression.value_type(node.inputs[0].dtype.name)
    return (stored,) if stored != "bool" else ()
