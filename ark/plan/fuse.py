"""Fusion: a matmul with a weight, the norm before it and what is done to its result become one
linear node, when the machine runs such rows on the operand stream.

A norm is computed again by every task that reads it (a row is short), an epilogue is applied where
the sum ends. Nothing is fused whose intermediate result anybody else reads.
"""

from __future__ import annotations

import copy
from collections import Counter

from ark.ir.model import Graph, Node
from ark.ir.tensor import Tensor
from ark.plan.machine import Machine

EPILOGUES = ("add", "swiglu", "rope_kv")
MAX_STREAM_ROWS = 8  # more input rows than this fill matrix units, where a machine has them


def fuse(graph: Graph, machine: Machine) -> Graph:
    """A copy of the graph with fused linear nodes; everything else as it was."""
    uses = Counter(t.id for n in graph.nodes for t in (*n.inputs, *n.after))
    made = copy.copy(graph)
    by_output = {t.id: n for n in graph.nodes for t in n.outputs}
    by_input: dict[int, Node] = {}
    for node in graph.nodes:
        for tensor in node.inputs:
            by_input.setdefault(tensor.id, node)
    dropped: set[int] = set()
    replaced: dict[int, Node] = {}
    for node in graph.nodes:
        if node.type != "matmul" or not _streams(node, machine):
            continue
        norm = by_output.get(node.inputs[0].id)
        if norm is not None and not (norm.type == "rmsnorm" and uses[node.inputs[0].id] == 1):
            norm = None
        last = by_input.get(node.outputs[0].id)
        if last is not None and not _epilogue(last, node.outputs[0], uses):
            last = None
        replaced[(last or node).id] = _linear(node, norm, last)
        dropped.update(n.id for n in (norm, node if last else None) if n is not None)
    made.nodes = [replaced.get(n.id, n) for n in graph.nodes if n.id not in dropped]
    return made


def _streams(node: Node, machine: Machine) -> bool:
    x, weight = node.inputs
    rows = x.shape[0]
    limit = 64 if machine.lanes * machine.warps == 1 else MAX_STREAM_ROWS
    return (
        weight.buffer.arena == "parameter"
        and weight.dense
        and weight.nbytes == weight.buffer.nbytes
        and len(x.shape) == len(weight.shape) == 2
        and bool(node.attrs["transpose_b"])
        and not node.attrs["transpose_a"]
        and rows <= limit
        and 4 * (rows * weight.shape[1] + machine.warps)
        <= machine.shared_bytes - machine.ring_bytes
    )


def _epilogue(node: Node, product: Tensor, uses: Counter[int]) -> bool:
    if node.type not in EPILOGUES or uses[product.id] != 1 or node.inputs[0].id != product.id:
        return False
    if node.type == "add":
        return len(node.inputs) == 2 and node.inputs[1].shape == product.shape
    return True


def _linear(node: Node, norm: Node | None, last: Node | None) -> Node:
    x, weight = node.inputs
    inputs = [norm.inputs[0] if norm else x, weight]
    attrs: dict[str, object] = {"prologue": "rmsnorm" if norm else "none", "epilogue": "store"}
    if norm:
        inputs.append(norm.inputs[1])
        attrs["eps"] = norm.attrs["eps"]
    if last:
        inputs += last.inputs[1:]
        attrs["epilogue"] = last.type
        attrs.update(last.attrs)
    end = last or node
    after = (*(norm.after if norm else ()), *node.after, *(last.after if last else ()))
    return Node(
        end.id, "linear", node.name, tuple(inputs), end.outputs, attrs, after, phase=node.phase
    )
