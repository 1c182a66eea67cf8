"""Dequantises weights in a separate node, for products that cannot read quantised weights. Linear
layers of few rows read codes (stored small integers) and scales directly (ark.tasks.linear_rows).
All other products read the dequantised values. Listed in ark.lower.passes. The weights of products
of many rows are dequantised before kernel variants are chosen. For the remaining products,
fuse_linear decides later which become linear layers, and calls `unpacked` for all others.
"""

from __future__ import annotations

import dataclasses

from ark.ir.attributes import GroupAttributes, MatmulAttributes
from ark.ir.dtype import RowType
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.codes import multiplies_codes
from ark.lower.rewrite.context import Context
from ark.machine import Machine
from ark.tasks.linear_form import MAX_UNIT_INPUT_ROWS, most_of_codes


def unpack_rows(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which products of many rows read dequantised weights. Without the
    option `fuse`, no product becomes a linear layer, and all products read dequantised weights.
    """
    fuses = context.options.get("fuse", True)
    if not fuses:
        return unpacked(graph, 0)
    return unpacked(graph, most_of_codes(context.machine), context.machine)


def unpacked(graph: Graph, few: int, machine: Machine | None = None) -> Graph:
    """A copy of the graph in which products of more than `few` rows do not stream quantised weights
    through the ring. A product of at most MAX_UNIT_INPUT_ROWS rows becomes a node that reads codes
    and scales from memory. Others read dequantised weights, which a separate node computes.

    machine: if given, products that its matrix units can multiply by codes are not changed.
    """
    keeps = machine is not None and graph.world_size == 1  # a collective's product reads values
    chosen = {
        n.id
        for n in graph.nodes
        if _reads_rows(n)
        and n.inputs[0].shape[-2] > few
        and not (keeps and machine is not None and multiplies_codes(n, machine))
    }
    if not chosen:
        return graph
    result = graph.with_nodes(graph.nodes)
    values: dict[tuple[int, int], Tensor] = {}  # by phase and weight
    nodes: list[Node] = []
    number = max(n.id for n in graph.nodes)
    for node in result.nodes:
        if node.id not in chosen:
            nodes.append(node)
            continue
        weight, key = node.inputs[1], (node.phase, node.inputs[1].id)
        assert isinstance(weight.dtype, RowType)
        if _multiplies_codes(node):
            attrs = GroupAttributes(group=weight.dtype.group).to_node()
            nodes.append(dataclasses.replace(node, type="quantized_linear", attrs=attrs))
            continue
        if key not in values:
            name, dtype = f"{weight.name}.values", weight.dtype.values
            values[key] = result.tensor(weight.shape, dtype, name=name)
            number += 1
            own, label = dataclasses.replace(node, hints=None), f"{node.name}.values"
            nodes.append(
                own.beside(number, "row_values", [weight], values[key], {}, label, waits=False)
            )
        inputs = (node.inputs[0], values[key], *node.inputs[2:])
        nodes.append(dataclasses.replace(node, inputs=inputs))
    result.nodes = nodes
    return result


def _multiplies_codes(node: Node) -> bool:
    """True if the product has so few rows that it reads quantised weights directly instead of
    dequantised ones.
    """
    plain = MatmulAttributes(False, True) == node.read(MatmulAttributes)
    return (
        plain and len(node.inputs[0].shape) == 2 and node.inputs[0].shape[0] <= MAX_UNIT_INPUT_ROWS
    )


def _reads_rows(node: Node) -> bool:
    return node.type == "matmul" and isinstance(node.inputs[1].dtype, RowType)
