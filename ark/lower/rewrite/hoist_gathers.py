"""Moves a gather of a few rows before the row-wise ops that compute the rows, so that only the
gathered rows are computed.

For example, a prompt's first token depends on one row: after the last layer's attention, all
further products, norms and gates are needed for that row only. A node is moved if each row of its
result depends only on the same row of its inputs and on operands that all rows share (weights), and
if no other op reads the result.

Listed in ark.lower.passes. It runs under the variant `matrix` only, whose bodies support any number
of rows.
"""

from __future__ import annotations

import dataclasses

from ark.ir.attributes import AxisAttributes, MatmulAttributes
from ark.ir.epilogues import GATED_PAIRS
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.pack_weights import writes
from ark.tasks import expression
from ark.tasks.node_expressions import expression_of, is_elementwise

BY_ROWS = ("layernorm", "rmsnorm", "rounded_rmsnorm", *GATED_PAIRS.values())
"""Ops, besides elementwise ones and products, in which row i of the result depends on row i of the
first input and on no other row.
"""
MIN_ROW_RATIO = 2  # fewest rows of a gather's source for each gathered row


def hoist_gathers(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which gathers of a few rows are moved before row-wise ops."""
    machine, kept = context.machine, context.kept
    if machine.variant.name != "matrix":
        return graph
    hoisted = graph.with_nodes(graph.nodes)
    for gather in [n for n in graph.nodes if n.type == "gather"]:
        place = hoisted.nodes.index(gather)
        moved = _moved(hoisted, place, kept)
        if any(n.type == "matmul" for n in moved) and _unchanged(hoisted, moved, place):
            hoisted.nodes = _rewritten(hoisted, moved, place)
    return hoisted


def _moved(graph: Graph, place: int, kept: frozenset[int]) -> list[Node]:
    """The nodes before the gather at index `place` that need to be computed for the gathered rows
    only, in program order.
    """
    gather = graph.nodes[place]
    source, ids = gather.inputs
    few = gather.read(AxisAttributes).axis == 0 and len(ids.shape) == 1 and len(source.shape) == 2
    if not few or gather.after or gather.hints or source.shape[0] < MIN_ROW_RATIO * ids.shape[0]:
        return []
    rows = source.shape[0]
    touching = graph.view.touching
    inside = {gather.id}
    wanted, whole = {source.id}, {ids.buffer.id}  # tensors read by rows, buffers read as a whole
    read = {source.buffer.id: {source.id}}
    moved: list[Node] = []
    for node in reversed(graph.nodes[:place]):
        out = node.outputs[0] if len(node.outputs) == 1 else None
        if out is None or out.id not in wanted or node.placement != gather.placement:
            continue
        private = out.buffer.arena == "activation" and out.buffer.id not in kept
        alone = touching[out.buffer.id] <= inside | {node.id} and read[out.buffer.id] == {out.id}
        fits = out.dense and out.nbytes == out.buffer.nbytes and out.buffer.id not in whole
        if private and alone and fits and _by_rows(node, rows):
            inside.add(node.id)
            places = _row_places(node, rows)
            for i, tensor in enumerate(node.inputs):
                read.setdefault(tensor.buffer.id, set()).add(tensor.id)
                if i in places:
                    wanted.add(tensor.id)
                else:
                    whole.add(tensor.buffer.id)
            moved.append(node)
    return moved[::-1]


def _by_rows(node: Node, rows: int) -> bool:
    """True if row i of the result depends only on row i of some inputs, each of which has `rows`
    rows, and on operands that all rows share.
    """
    out = node.outputs[0]
    if node.virtual or node.after or len(out.shape) != 2 or out.shape[0] != rows:
        return False
    if is_elementwise(node):
        placed = bool(expression.places(expression_of(node)))
        return not placed and bool(node.inputs) and not any(t.dtype.packed for t in node.inputs)
    if node.type == "matmul":
        given = node.read(MatmulAttributes)
        plain = not given.transpose_a and given.finish is None
        return plain and all(len(t.shape) == 2 for t in node.inputs)
    return node.type in BY_ROWS and len(node.inputs[0].shape) == 2


def _row_places(node: Node, rows: int) -> set[int]:
    """The indices of the inputs that the node reads row by row: row i of the result depends only on
    row i of these inputs. All other inputs are read as a whole.
    """
    if is_elementwise(node):
        shapes = [t.shape for t in node.inputs]
        return {i for i, shape in enumerate(shapes) if len(shape) == 2 and shape[0] == rows}
    return {0}


def _unchanged(graph: Graph, moved: list[Node], place: int) -> bool:
    """True if no remaining op writes an operand of the moved nodes between their old and their
    new position.
    """
    ids = {n.id for n in moved}
    reads = {t.buffer.id for n in moved for t in n.inputs}
    between = graph.nodes[graph.nodes.index(moved[0]) : place]
    return not any(b in reads for n in between if n.id not in ids for b in writes(n))


def _rewritten(graph: Graph, moved: list[Node], place: int) -> list[Node]:
    """The nodes of the new graph. The gather at index `place` is replaced by gathers of the rows of
    the moved nodes' inputs, and by copies of the moved nodes that compute only these rows.
    """
    gather = graph.nodes[place]
    source, ids = gather.inputs
    rows, few = source.shape[0], ids.shape[0]
    number = max(n.id for n in graph.nodes)
    inside = {t.id for n in moved for t in n.outputs}
    writers = {t.id: at for at, n in enumerate(graph.nodes) for t in n.outputs}
    read = {n.inputs[i].id: (n, i) for n in reversed(moved) for i in sorted(_row_places(n, rows))}
    taken: dict[int, Tensor] = {}  # by tensor: its gathered rows
    nodes: list[Node] = []
    # Tensors are gathered in the order in which they are written, so that no gather waits behind a
    # gather of a tensor that is written later.
    for key in sorted(read.keys() - inside, key=lambda key: (writers.get(key, -1), key)):
        reader, i = read[key]
        number += 1
        taken[key] = _fewer(graph, reader.inputs[i], few)
        inputs, name = (reader.inputs[i], ids), f"{reader.name}.rows"
        nodes.append(
            dataclasses.replace(gather, id=number, name=name, inputs=inputs, outputs=(taken[key],))
        )
    for node in moved:
        out, number, places = node.outputs[0], number + 1, _row_places(node, rows)
        last = out.id == source.id
        taken[out.id] = gather.outputs[0] if last else _fewer(graph, out, few)
        fewer = tuple(taken[t.id] if i in places else t for i, t in enumerate(node.inputs))
        nodes.append(dataclasses.replace(node, id=number, inputs=fewer, outputs=(taken[out.id],)))
    removed = {n.id for n in moved} | {gather.id}
    return [
        each
        for at, node in enumerate(graph.nodes)
        for each in (nodes if at == place else [node] if node.id not in removed else [])
    ]


def _fewer(graph: Graph, tensor: Tensor, rows: int) -> Tensor:
    """A new tensor with the type and columns of `tensor` and with `rows` rows."""
    return graph.tensor((rows, tensor.shape[1]), tensor.dtype, name=tensor.name)
