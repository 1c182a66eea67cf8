"""Shares that pass through ops: which operands of an op may be shares of a value, so that its
result is the same share.

Each expert's products are zeros for the rows that went to others. What rank has some of the experts
has a share of the result, and a gated perceptron of it is a share too, because it makes zeros of
zeros. What is linear goes on so: weighting, and adding up what the chosen experts made. So one sum
over the ranks ends a mixture of experts. Asked by ark.parallel.transform.pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ark.ir.graph import Node

VALUE = "+"
"""The letter by which an op is split into shares of its operands' values."""
EXPERT = "e"
"""The letter of `expert_linear` that counts experts."""
ZEROS = frozenset(("mul", "swiglu", "geglu", "silu", "gelu", "relu", "add", "sub", "neg", "copy"))
"""Elementwise functions that make zero of zeros."""
LINEAR = frozenset(("copy", "reduce_sum", "reshape", "transpose", "expand", "neg"))
"""Ops of one operand of which a sum's result is the sum of the results."""
Carried = Mapping[str, frozenset[int]]
"""By letter, the operands that are shares where an op is split along it."""


def carried(nodes: Sequence[Node]) -> dict[int, Carried]:
    """By node id; nodes to which no share comes are left out."""
    rows: dict[int, int] = {}  # by buffer: whose experts' rows are its share
    shares: set[int] = set()  # buffers that come in shares
    found: dict[int, Carried] = {}
    for node in nodes:
        read = [t.buffer.id for t in node.inputs]
        if node.type == "expert_linear":
            rows[node.outputs[0].buffer.id] = read[2]
            shares.add(node.outputs[0].buffer.id)
            if rows.get(read[0]) == read[2]:
                found[node.id] = {EXPERT: frozenset((0,))}
            continue
        able = _able(node, read, rows, shares)
        if not able:
            continue
        found[node.id] = {VALUE: able}
        shares.add(node.outputs[0].buffer.id)
        of = {rows[read[i]] for i in able if read[i] in rows}
        if node.type in ZEROS and len(of) == 1 and all(read[i] in rows for i in able):
            rows[node.outputs[0].buffer.id] = of.pop()
    return found


def _able(
    node: Node, read: Sequence[int], rows: Mapping[int, int], shares: set[int]
) -> frozenset[int]:
    """The operands that may be shares together; none where it cannot be."""
    several = frozenset(i for i, buffer in enumerate(read) if buffer in shares)
    if not several or len(node.outputs) != 1 or "expr" in node.attrs:
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
