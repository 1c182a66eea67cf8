"""Lets several processors compute one row of a layer norm, if there are few and long rows, such as
those of group norms over large images.

A task of a norm computes whole rows, so 32 rows keep only 32 processors busy. Such a norm is
replaced by a mean, a mean of squared differences and an elementwise op. The two means are
reductions of long rows, which are computed in parts (ark.lower.ops.reductions), and the elementwise
op is fused with the ops that read it.

On machines with one thread per processor, a sum of squared differences from the mean becomes a mean
and a sum of squares, whose loops can be vectorised. Listed in ark.lower.passes before chains are
fused.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from ark.ir.attributes import NormAttributes, ReduceAttributes
from ark.ir.dtype import fp32
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.machine import Machine
from ark.tasks import expression
from ark.tasks.node_expressions import is_elementwise


def split_norms(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which norms of few long rows are computed by all processors."""
    chosen = {n.id for n in graph.nodes if _splits(n, context.machine)}
    apart = {n.id for n in graph.nodes if n.type == "reduce_squares"}
    apart = set() if context.machine.cooperative else apart
    if not chosen | apart:
        return graph
    numbers = itertools.count(1 + max(n.id for n in graph.nodes))
    nodes: list[Node] = []
    read = {n.inputs[0].id for n in graph.nodes if n.id in apart}
    copies: dict[int, Tensor] = {}  # by the id of a tensor that an elementwise op computes
    for node in graph.nodes:
        if node.id in chosen:
            nodes += _parts(graph, node, numbers)
        elif node.id in apart:
            nodes += _squares(graph, node, numbers, copies)
        else:
            nodes.append(node)
        if is_elementwise(node) and node.outputs[0].id in read:
            # The op is computed twice, once for each of the two ops that read its result. Each copy
            # can then be fused with its reader.
            result = node.outputs[0]
            copy = graph.tensor(result.shape, result.dtype, name=f"{node.name}.copy")
            copies[result.id] = copy
            number = next(numbers)
            nodes.append(dataclasses.replace(node, id=number, name=copy.name, outputs=(copy,)))
    return graph.with_nodes(nodes)


def _squares(
    graph: Graph, node: Node, numbers: Iterator[int], copies: Mapping[int, Tensor]
) -> list[Node]:
    """The nodes that replace a sum of squared differences from the mean. copies: a tensor with the
    same elements as the input, by the input's id, if there is one.
    """
    (source,) = node.inputs
    given = node.read(ReduceAttributes)
    few = tuple(1 if d == given.axis else n for d, n in enumerate(source.shape))
    mean = graph.tensor(few, fp32, name=f"{node.name}.mean")
    squares = graph.tensor(source.shape, fp32, name=f"{node.name}.squares")
    difference = ["sub", expression.leaf(0), expression.leaf(1)]
    product = ["mul", difference, difference]
    named = {"function": "mean", "axis": given.axis, "keepdims": True}
    mean_of = ReduceAttributes.from_node(named).to_node()
    sum_of = ReduceAttributes.from_node({**node.attrs, "function": "sum"}).to_node()

    def add(type: str, inputs: tuple[Tensor, ...], result: Tensor, attrs: Any) -> Node:
        own = {"id": next(numbers), "type": type, "name": result.name, "attrs": attrs}
        return dataclasses.replace(node, inputs=inputs, outputs=(result,), **own)

    return [
        add("reduce_mean", (source,), mean, mean_of),
        add("elementwise", (copies.get(source.id, source), mean), squares, {"expr": product}),
        dataclasses.replace(node, type="reduce_sum", inputs=(squares,), attrs=sum_of),
    ]


def _splits(node: Node, machine: Machine) -> bool:
    """True for a layer norm of long rows that would keep less than half of the processors busy."""
    if node.type != "layernorm" or len(node.inputs) != 1 or node.hints is not None:
        return False
    source = node.inputs[0]
    size = source.shape[-1] * source.dtype.itemsize
    few = 2 * source.elements // source.shape[-1] <= machine.processors
    return machine.cooperative and few and size >= machine.costs.long_row_bytes


def _parts(graph: Graph, node: Node, numbers: Iterator[int]) -> list[Node]:
    """The nodes that replace a layer norm: a mean, a mean of squared differences and an elementwise
    op.
    """
    (source,) = node.inputs
    axis = len(source.shape) - 1
    few = (*source.shape[:-1], 1)
    mean_of = ReduceAttributes(function="mean", axis=axis, keepdims=True).to_node()

    def add(type: str, inputs: tuple[Tensor, ...], result: Tensor, attrs: Any) -> Node:
        return node.beside(next(numbers), type, inputs, result, attrs)

    def wide(name: str) -> Tensor:
        return graph.tensor(source.shape, fp32, name=f"{node.name}.{name}")

    def narrow(name: str) -> Tensor:
        return graph.tensor(few, fp32, name=f"{node.name}.{name}")

    value, squares, mean, variance = wide("value"), wide("squares"), narrow("mean"), narrow("var")
    difference = ["sub", ["cast", "fp32", expression.leaf(0)], expression.leaf(1)]
    scale = ["rsqrt", ["add", expression.leaf(2), ["number", node.read(NormAttributes).eps]]]
    steps = [
        add("elementwise", (source,), value, {"expr": ["cast", "fp32", expression.leaf(0)]}),
        add("reduce_mean", (value,), mean, mean_of),
        add("elementwise", (source, mean), squares, {"expr": ["mul", difference, difference]}),
        add("reduce_mean", (squares,), variance, mean_of),
    ]
    whole = {"expr": ["mul", difference, scale]}
    last = dataclasses.replace(
        node, type="elementwise", inputs=(source, mean, variance), attrs=whole
    )
    return [*steps, last]
