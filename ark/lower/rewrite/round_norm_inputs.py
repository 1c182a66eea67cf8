"""Stores the input of some norms a second time, rounded to 16 bits: inputs that have one row for
each of several sequences. Every processor reads all of these rows to normalise them, and packets
with fp32 values would have four times the bytes. Residuals still read the fp32 rows. Listed in
ark.lower.passes.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from ark.ir.attributes import LinearAttributes
from ark.ir.dtype import bf16, fp32
from ark.ir.epilogues import EPILOGUES
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.machine import Machine
from ark.machine.variant import COMMUNICATE
from ark.tasks.linear_form import MAX_UNIT_INPUT_ROWS


def round_norm_inputs(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which layers that begin with a norm read rounded rows.

    Rows are rounded only to bf16, which has the range of fp32, because a norm's input may be large.
    """
    machine, kept = context.machine, context.kept
    if not machine.variant.role(COMMUNICATE):
        return graph
    readers: dict[int, list[int]] = defaultdict(list)  # by tensor: indices of these layers
    for place, node in enumerate(graph.nodes):
        if _gathers(node, context.machine) and node.inputs[0].buffer.id not in kept:
            readers[node.inputs[0].id].append(place)
    result = graph.with_nodes(graph.nodes)
    for place, node in enumerate(graph.nodes):
        out = node.outputs[0] if len(node.outputs) == 1 else None
        if out is None or out.id not in readers or not _writes_twice(node, out):
            continue
        if len(graph.view.writers[out.buffer.id]) > 1:
            continue
        rounded = result.tensor(out.shape, bf16, name=f"{out.name}.rounded")
        result.nodes[place] = dataclasses.replace(result.nodes[place], outputs=(out, rounded))
        for at in readers[out.id]:
            reader = result.nodes[at]
            inputs = (rounded, *reader.inputs[1:])
            result.nodes[at] = dataclasses.replace(reader, inputs=inputs)
    return result


def _gathers(node: Node, machine: Machine) -> bool:
    """True for a linear layer that begins with a norm, if its input has several rows and would be
    too large to be stored as packets.
    """
    if node.type != "linear" or node.read(LinearAttributes).prologue == "none":
        return False
    x, weight = node.inputs[:2]
    few = 1 < x.shape[0] <= MAX_UNIT_INPUT_ROWS and x.elements > machine.costs.rounded_elements
    whole = x.dense and x.nbytes == x.buffer.nbytes and x.buffer.arena == "activation"
    return few and whole and x.dtype == fp32 and weight.dtype == node.inputs[2].dtype == bf16


def _writes_twice(maker: Node, out: Tensor) -> bool:
    """True if the node can also store its result in a second tensor of another type."""
    if maker.type == "linear":
        spread = EPILOGUES[maker.read(LinearAttributes).epilogue].spread
        return spread and maker.inputs[0].shape[0] == out.shape[0]
    return maker.type == "embed"
