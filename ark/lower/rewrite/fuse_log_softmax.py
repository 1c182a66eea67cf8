"""Computes a log-softmax where it is read, if one element of each row is looked up, as in a cross
entropy over many classes.

y = log_softmax(x); gather_elements(y, classes); op(y)

becomes

s = logsumexp(x); gather_elements(x, classes) - s; op(x - s)

so that rows of x are read once and no tensor of the size of x is stored. Elementwise ops and
reductions of y, such as those of its gradient, compute their own x - s, which later passes fuse
into them. If x is a cast of a 16-bit tensor, that tensor is read. Listed in ark.lower.passes.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from ark.ir.attributes import AxisAttributes, ReduceAttributes
from ark.ir.dtype import FLOATS, fp32
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_reduction_terms import REDUCTIONS
from ark.lower.rewrite.makers import only_makers, without
from ark.tasks.expression import leaf
from ark.tasks.node_expressions import is_elementwise

DIFFERENCE = ["sub", leaf(0), leaf(1)]
MIN_COLUMNS = 32  # shorter rows are as fast to store as to read again


@dataclass(frozen=True)
class _Fused:
    """A log-softmax that is not stored. rows: its input. sums: the logarithms that are subtracted
    from the rows.
    """

    node: Node
    rows: Tensor
    sums: Tensor


def fuse_log_softmax(graph: Graph, context: Context) -> Graph:
    """A copy of the graph without log-softmaxes whose elements are looked up."""
    replaceable = [
        n for n in graph.nodes if n.type == "log_softmax" and _looked_up(graph, n, context)
    ]
    if not replaceable:
        return graph
    numbers = itertools.count(1 + max(n.id for n in graph.nodes))
    read = {n.inputs[0].buffer.id for n in replaceable}
    casts = {n.id for n in graph.nodes if n.type == "cast" and n.outputs[0].buffer.id in read}
    fused: dict[int, _Fused] = {}  # by the buffer of the log-softmax
    nodes: list[Node] = []
    for node in graph.nodes:
        if node in replaceable:
            one = _fused(graph, node)
            fused[node.outputs[0].buffer.id] = one
            nodes.append(_sums(one))
            continue
        for number in sorted({t.buffer.id for t in node.inputs} & fused.keys()):
            before, node = _reading(graph, node, fused[number], next(numbers))
            nodes.append(before)
        nodes.append(node)
    return without(graph.with_nodes(nodes), set(), casts, context.kept)


def _looked_up(graph: Graph, node: Node, context: Context) -> bool:
    """True if elements of the log-softmax are looked up, and all of its readers can compute them
    from its input.
    """
    out, view = node.outputs[0], graph.view
    number = out.buffer.id
    readers = [n for n in graph.nodes if any(t.buffer.id == number for t in (*n.inputs, *n.after))]
    if out.buffer.arena != "activation" or number in context.kept or node.hints is not None:
        return False
    if len(view.writers[number]) != 1 or out.shape[-1] < MIN_COLUMNS:
        return False
    place = view.places[node.id]
    if any(view.places[w.id] > place for w in _writers(graph, node)):
        return False  # the rows are overwritten, possibly before a reader
    along = len(out.shape) - 1
    return any(n.type == "gather_elements" for n in readers) and all(
        _reads(n, out, along) for n in readers
    )


def _writers(graph: Graph, node: Node) -> list[Node]:
    """The nodes that write the rows of a log-softmax, or what the rows are cast from."""
    sources = {node.inputs[0].buffer.id, _rows(graph, node).buffer.id}
    return [w for number in sources for w in graph.view.writers.get(number, ())]


def _reads(reader: Node, out: Tensor, along: int) -> bool:
    """True if the node can compute the elements of the log-softmax that it reads."""
    if reader.hints is not None or any(t.buffer.id == out.buffer.id for t in reader.after):
        return False
    if any(t.buffer.id == out.buffer.id and t.shape != out.shape for t in reader.inputs):
        return False
    if reader.type == "gather_elements":
        ids = reader.inputs[1].shape
        return reader.read(AxisAttributes).axis == along and ids[:-1] == out.shape[:-1]
    return is_elementwise(reader) or reader.type in REDUCTIONS


def _rows(graph: Graph, node: Node) -> Tensor:
    """The input of a log-softmax, or the tensor from which the input is cast."""
    rows = node.inputs[0]
    maker = only_makers(graph).get(rows.buffer.id)
    if maker is None or maker.type != "cast" or maker.inputs[0].shape != rows.shape:
        return rows
    return maker.inputs[0] if maker.inputs[0].dtype in FLOATS else rows


def _fused(graph: Graph, node: Node) -> _Fused:
    rows = _rows(graph, node)
    shape = (*rows.shape[:-1], 1)
    return _Fused(node, rows, graph.tensor(shape, fp32, name=f"{node.name}.sums"))


def _sums(fused: _Fused) -> Node:
    """The node that takes the place of the log-softmax."""
    axis = len(fused.rows.shape) - 1
    given = ReduceAttributes(function="logsumexp", axis=axis, keepdims=True)
    node = fused.node
    return node.beside(node.id, "reduce_logsumexp", [fused.rows], fused.sums, given.to_node())


def _reading(graph: Graph, reader: Node, fused: _Fused, number: int) -> tuple[Node, Node]:
    """Two nodes that replace a reader of the log-softmax. A look-up becomes a look-up in the rows
    and a subtraction of the sums; any other reader reads a difference of its own. number: the id of
    the first node.
    """
    out = fused.node.outputs[0]
    if reader.type == "gather_elements":
        ids = reader.inputs[1]
        looked_up = graph.tensor(ids.shape, fused.rows.dtype, name=f"{reader.name}.rows")
        first = dataclasses.replace(
            reader, id=number, name=looked_up.name, inputs=(fused.rows, ids), outputs=(looked_up,)
        )
        attrs = {"expr": DIFFERENCE}
        given = (looked_up, fused.sums)
        return first, dataclasses.replace(reader, type="elementwise", inputs=given, attrs=attrs)
    below = graph.tensor(out.shape, out.dtype, name=f"{fused.node.name}.below")
    operands, attrs = (fused.rows, fused.sums), {"expr": DIFFERENCE}
    first = reader.beside(number, "elementwise", operands, below, attrs, waits=False)
    inputs = (below if t.buffer.id == out.buffer.id else t for t in reader.inputs)
    return first, dataclasses.replace(reader, inputs=tuple(inputs))
