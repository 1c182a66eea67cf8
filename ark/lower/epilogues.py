"""What is done to a product element by element is done where its sums end: a bias, a residual, an
activation, a scale or a cast behind a matmul become the matmul's own expression, so that the
product is neither written nor read. Within it values are fp32, as in joined chains.

In a gated layer it is what two neighbouring columns make (silu(gate) * up).

Only where the product's body takes expressions: under the variant for large products and where a
processor has one thread. Called by ark.lower.pipeline after chains are joined.
"""

from __future__ import annotations

import copy
import dataclasses

from ark.codegen.layout import RECORD_OPERANDS
from ark.ir.dtype import FLOATS
from ark.ir.graph import Graph, Node
from ark.lower.chains import expression_of, is_pointwise, read_once
from ark.machine import Machine
from ark.tasks import expression

OTHERS = RECORD_OPERANDS - 5  # beside the product's operands and its two box maps


def join_epilogues(graph: Graph, machine: Machine, kept: frozenset[int] = frozenset()) -> Graph:
    """A copy of the graph with joined products. kept: ids of buffers that somebody else reads."""
    if machine.variant.name != "matrix" and not machine.has("single_thread"):
        return graph
    private = read_once(graph, kept)
    gates = machine.variant.name == "matrix"
    products: dict[int, tuple[int, Node]] = {}  # by tensor: place and node
    written: dict[int, int] = {}  # by buffer: place of the last write
    nodes: list[Node | None] = []
    for place, node in enumerate(graph.nodes):
        if is_pointwise(node):
            found = [products[t.id] for t in node.inputs if t.id in products]
            if len(found) == 1:
                at, product = found[0]
                current = max((written.get(t.buffer.id, -1) for t in product.inputs), default=-1)
                if current <= at and _fits(product, node):
                    nodes[at] = None
                    node = _join(product, node)
        elif node.type == "swiglu_pairs" and gates and node.inputs[0].id in products:
            at, product = products[node.inputs[0].id]
            current = max((written.get(t.buffer.id, -1) for t in product.inputs), default=-1)
            if current <= at and _gates(product, node):
                nodes[at] = None
                attrs = {**product.attrs, "gated": True}
                after = (*product.after, *node.after)
                outputs, number = node.outputs, node.id
                node = dataclasses.replace(
                    product, id=number, outputs=outputs, attrs=attrs, after=after
                )
        elif node.type == "matmul" and "finish" not in node.attrs and not node.hints:
            out = node.outputs[0]
            if private(out):
                products[out.id] = (place, node)
        for tensor in node.outputs:
            written[tensor.buffer.id] = place
        nodes.append(node)
    made = copy.copy(graph)
    made.nodes = [n for n in nodes if n is not None]
    return made


def _fits(product: Node, node: Node) -> bool:
    between, out = product.outputs[0], node.outputs[0]
    return (
        product.placement == node.placement
        and not node.hints
        and between.shape == out.shape
        and out.dtype in FLOATS
        and not any(t.dtype.packed for t in node.inputs)
        and not expression.places(expression_of(node))
        and len({t.id for t in node.inputs}) <= OTHERS
        # Tiles of the joined op read whole rows and columns of both sides.
        and out.buffer.id not in {t.buffer.id for t in product.inputs}
    )


def _gates(product: Node, node: Node) -> bool:
    """May the product apply the gate between its neighbouring columns itself?"""
    out = node.outputs[0]
    return (
        product.placement == node.placement
        and not node.hints
        and len(product.inputs[0].shape) == len(product.inputs[1].shape) == 2
        and product.outputs[0].shape[1] >= 64
        and out.dtype in FLOATS
        and out.dense
        and out.shape[1] % 8 == 0
        and out.buffer.id not in {t.buffer.id for t in product.inputs}
    )


def _join(product: Node, node: Node) -> Node:
    between = product.outputs[0]
    others = [t for t in node.inputs if t.id != between.id]
    leaves = [
        expression.leaf(0 if t.id == between.id else 1 + others.index(t)) for t in node.inputs
    ]
    return dataclasses.replace(
        node,
        type="matmul",
        name=product.name,
        inputs=(*product.inputs, *others),
        attrs={**product.attrs, "finish": expression.substitute(expression_of(node), leaves)},
        after=(*product.after, *node.after),
    )
