"""Partial sums that pass through ops: which operands of an op may be partial sums, so that its
result is the same kind of partial sum.

Each expert's matmul gives zeros for the rows of other experts. So a rank with some of the experts
has a partial sum of the result, and a gated perceptron of it is a partial sum too, because it maps
zeros to zeros. Linear ops continue this: weighting, and adding the results of the chosen experts.
One sum over the ranks therefore ends a mixture of experts. Used by ark.parallel.transform.pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ark.ir.graph import Node
from ark.ops.math import GATED

VALUE = "+"
"""The letter along which an op is split into partial sums of its operands' values."""
EXPERT = "e"
"""The letter of `expert_linear` that counts experts."""
ZEROS = frozenset(("mul", *GATED, "silu", "gelu", "relu", "add", "sub", "neg", "copy"))
"""Elementwise functions that map zeros to zero."""
LINEAR = frozenset(("copy", "reduce_sum", "reshape", "transpose", "expand", "neg"))
"""Unary ops for which the result of a sum is the sum of the results."""
Carried = Mapping[str, frozenset[int]]
"""For each letter, the operands that are partial sums when an op is split along it."""


def carried(nodes: Sequence[Node]) -> dict[int, Carried]:
    """By node id; nodes without such operands are omitted."""
    rows: dict[int, int] = {}  # by buffer: whose experts' rows are its share
    shares: set[int] = set()  # buffers that arrive as partial sums
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
    """The operands that may be partial sums together; empty if none."""
    several = frozenset(i for i, buffer in enumerate(read) if buffer in shares)
    if not several or len(node.outputs) != 1 or node.elementwise.expr is not None:
        return frozenset()
    shifted = node.type in ("add", "sub") and len(read) == 1  # by a number
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
