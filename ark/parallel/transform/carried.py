"""Finds ops that can be applied to partial sums. Each rank applies such an op to its partial sum of
an operand, and the ranks' results are then partial sums of the op's result.

In a mixture of experts, each expert's matmul gives zeros for the rows of other experts. So the
result on a rank with some of the experts is a partial sum. The activation of an expert's gated
perceptron can be applied to it, because it maps zeros to zeros. Linear ops can be applied too:
multiplying by the experts' scores, and adding the results of the chosen experts. Therefore one sum
over the ranks at the end of the mixture suffices. Used by ark.parallel.transform.pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ark.ir.graph import Node
from ark.ops.math import GATED

VALUE = "+"
"""A letter that stands for splitting an op into partial sums. Each part of the op reads one partial
sum of the operands.
"""
EXPERT = "e"
"""The letter for experts in the annotation of `expert_linear`."""
ZEROS = frozenset(("mul", *GATED, "silu", "gelu", "relu", "add", "sub", "neg", "copy"))
"""Elementwise functions that map zeros to zeros."""
LINEAR = frozenset(("copy", "reduce_sum", "reshape", "transpose", "expand", "neg"))
"""Ops that are linear in their operand: applied to a sum, they give the sum of their results."""
Carried = Mapping[str, frozenset[int]]
"""For each letter of an op, the operands that are partial sums if the op is split along this
letter.
"""


def carried(nodes: Sequence[Node]) -> dict[int, Carried]:
    """For each node id, the operands of the node that may be partial sums. Nodes without such
    operands are omitted.
    """
    rows: dict[int, int] = {}  # by buffer: the buffer that assigns its rows to experts
    shares: set[int] = set()  # buffers that may be partial sums
    operands_of: dict[int, Carried] = {}
    for node in nodes:
        read = [t.buffer.id for t in node.inputs]
        if node.type == "expert_linear":
            rows[node.outputs[0].buffer.id] = read[2]
            shares.add(node.outputs[0].buffer.id)
            if rows.get(read[0]) == read[2]:
                operands_of[node.id] = {EXPERT: frozenset((0,))}
            continue
        able = _able(node, read, rows, shares)
        if not able:
            continue
        operands_of[node.id] = {VALUE: able}
        shares.add(node.outputs[0].buffer.id)
        of = {rows[read[i]] for i in able if read[i] in rows}
        if node.type in ZEROS and len(of) == 1 and all(read[i] in rows for i in able):
            rows[node.outputs[0].buffer.id] = of.pop()
    return operands_of


def _able(
    node: Node, read: Sequence[int], rows: Mapping[int, int], shares: set[int]
) -> frozenset[int]:
    """The operands of a node that may be partial sums at the same time."""
    several = frozenset(i for i, buffer in enumerate(read) if buffer in shares)
    if not several or len(node.outputs) != 1 or node.elementwise.expr is not None:
        return frozenset()
    # `shifted` is True if the node adds a constant to a tensor or subtracts a constant from it.
    # Such a node does not map zeros to zeros.
    shifted = node.type in ("add", "sub") and len(read) == 1
    if node.type in ZEROS and len(several) == len(read) and not shifted:
        of = {rows.get(buffer) for buffer in read}
        if len(of) == 1 and None not in of:
            return several
    linear = (
        node.type in LINEAR
        or (node.type in ("mul", "matmul") and len(several) == 1)
        or (node.type == "div" and several == {0})
        or (node.type in ("add", "sub") and len(several) == len(read) == 2)
    )
    return several if linear else frozenset()
