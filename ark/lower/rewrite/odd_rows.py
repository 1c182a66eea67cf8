"""Finds the buffers whose rows have an odd length and should be stored at multiples of 16 bytes.
Called by align_operands and pad_rows in ark.lower.rewrite.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ark.ir.graph import Graph, Node
from ark.ir.graph_view import touched
from ark.ir.values import Tensor
from ark.lower.boxed import MIN_MATRIX_UNIT_ROWS, boxes
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_reduction_terms import REDUCTIONS
from ark.machine import Machine
from ark.plan.types import BOX_ALIGNMENT_BYTES
from ark.tasks.node_expressions import is_elementwise

COLUMNS_PER_ADDED_ONE = 6  # rows grow by at most one part in this many
ANY_PITCH = frozenset(
    {
        "fusion",
        "gather_elements",
        "layernorm",
        "log_softmax",
        "matmul",
        "rmsnorm",
        "safe_softmax",
        "softmax",
        "transpose",
        *REDUCTIONS,
    }
)
"""Ops whose device functions accept any distance between rows, besides elementwise ops."""


def pitch(tensor: Tensor) -> int:
    """The distance between the tensor's rows, in elements, at which they begin at multiples of
    BOX_ALIGNMENT_BYTES.
    """
    alignment = max(1, BOX_ALIGNMENT_BYTES // tensor.dtype.itemsize)
    return -(-tensor.extents[-1] // alignment) * alignment


def padded_rows(graph: Graph, context: Context) -> frozenset[int]:
    """The ids of the buffers whose rows should be padded: those that products read or write, and
    those that other ops access at the same indices.

    An elementwise op accesses either all or none of its operands with the result's shape by padded
    rows; otherwise it would be slower than without padding.
    """
    machine = context.machine
    if not (machine.cooperative and machine.coalesces) or graph.world_size > 1:
        return frozenset()
    able = _able(graph, context)
    products = {i for n in graph.nodes if n.type == "matmul" for i in _gaining(n, machine)}
    joint = [list(_joint(n, able)) for n in graph.nodes if not n.virtual]
    while True:
        chosen = products & able
        grown = True
        while grown:
            more = {i for same in joint if chosen & set(same) for i in same} & able
            grown = not more <= chosen
            chosen |= more
        torn = {
            i for same in joint if chosen & set(same) and not able.issuperset(same) for i in same
        }
        if not chosen & torn:
            return frozenset(chosen)
        able -= torn


def _gaining(product: Node, machine: Machine) -> Iterator[int]:
    """The ids of the buffers that a product on matrix units reads or writes faster if their rows
    are aligned.
    """
    out, sides = product.outputs[0], product.inputs[:2]
    units = out.shape[-2] >= MIN_MATRIX_UNIT_ROWS and all(t.dtype.itemsize <= 2 for t in sides)
    if units and out.shape[-1] >= machine.large_product[1]:
        yield out.buffer.id
    if boxes(product, machine) if machine.variant.name == "matrix" else units:
        yield from (t.buffer.id for t in sides)


def _joint(node: Node, able: set[int]) -> Iterator[int]:
    """The buffers of the operands that a node accesses at the same indices."""
    if is_elementwise(node) or node.type in REDUCTIONS:
        operands: Sequence[Tensor] = (*node.inputs, *node.outputs)
        shape = (node.outputs if is_elementwise(node) else node.inputs)[0].shape
    elif node.type == "matmul":
        operands, shape = (*node.inputs[2:], *node.outputs), node.outputs[0].shape
    else:
        return
    whole = [t for t in operands if t.shape == shape]
    if any(t.buffer.id in able for t in whole):
        yield from (t.buffer.id for t in whole)


def _able(graph: Graph, context: Context) -> set[int]:
    """The ids of the buffers whose rows can be padded."""
    nodes: dict[int, list[Node]] = defaultdict(list)
    tensors: dict[int, list[Tensor]] = defaultdict(list)
    for node in graph.nodes:
        for tensor in touched(node):
            if not node.virtual and tensor.buffer.arena == "activation":
                nodes[tensor.buffer.id].append(node)
                tensors[tensor.buffer.id].append(tensor)
    read = graph.view.reads  # the other buffers hold results
    hidden = (i for i in tensors if read[i] and i not in context.kept | graph.received)
    return {
        i
        for i in hidden
        if _odd(tensors[i])
        and all(n.hints is None and (is_elementwise(n) or n.type in ANY_PITCH) for n in nodes[i])
    }


def _odd(tensors: Sequence[Tensor]) -> bool:
    """True if all tensors of a buffer are boxes of the same matrix of odd rows."""
    first = tensors[0]
    columns, wanted = first.extents[-1], pitch(first)
    return (
        columns < wanted
        and (wanted - columns) * COLUMNS_PER_ADDED_ONE <= columns
        and math.prod(first.extents) > columns
        and not first.dtype.packed
        and all(
            t.dtype == first.dtype
            and t.extents[-1] == columns
            and t.dtype.nbytes(math.prod(t.extents)) == t.buffer.nbytes
            for t in tensors
        )
    )
