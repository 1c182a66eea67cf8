"""Convolutions as products that read their windows in place, where no matrix unit multiplies.

A convolution is written as a product with a matrix of windows (ark.ops.windows), which matrix units
need. Where none serves the product, laying the matrix out costs more than reading it saves: an op
and a hand-over more, and as many times the input as a window has elements. Called by
ark.lower.prepare.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.chains import read_once
from ark.lower.rewrite.views import whole
from ark.machine import Machine
from ark.tasks.matmul_text import FEW_ROWS as PACKED_ROWS

FEW_ROWS = 9  # fewer are not worth a matrix unit


def read_windows(graph: Graph, machine: Machine, kept: frozenset[int]) -> Graph:
    """A copy of the graph with such products. kept: ids of buffers that somebody else reads."""
    private = read_once(graph, kept)
    windows: dict[int, tuple[int, Node]] = {}  # by buffer: place and node
    written: dict[int, int] = {}  # by buffer: place of the last write
    nodes: list[Node | None] = []
    for place, node in enumerate(graph.nodes):
        if node.type == "remap" and private(node.outputs[0]) and whole(node.outputs[0]):
            windows[node.outputs[0].buffer.id] = (place, node)
        elif node.type == "matmul" and node.inputs[1].buffer.id in windows:
            at, before = windows[node.inputs[1].buffer.id]
            current = written.get(before.inputs[0].buffer.id, -1)
            joined = _joined(before, node, machine) if current <= at else None
            if joined is not None:
                nodes[at] = None
                node = joined
        for tensor in node.outputs:
            written[tensor.buffer.id] = place
        nodes.append(node)
    return graph.with_nodes(n for n in nodes if n is not None)


def _joined(windows: Node, product: Node, machine: Machine) -> Node | None:
    """Both as one node; None where the product is none of windows, or a matrix unit serves it."""
    weight, table, *others = product.inputs
    if windows.placement != product.placement or windows.hints or product.hints:
        return None
    if not whole(table) or not whole(weight) or len(table.shape) != 4 or len(weight.shape) != 4:
        return None
    n, groups, depth, places = table.shape
    rows = weight.shape[2]
    if machine.variant.name == "matrix" or weight.shape != (1, groups, rows, depth):
        return None
    if product.attrs["transpose_a"] or product.attrs["transpose_b"] or product.attrs.get("gated"):
        return None
    alone = machine.has("single_thread")
    if rows >= (PACKED_ROWS if alone else FEW_ROWS) and (alone or not _scalar(product)):
        return None
    found = window(windows, groups)
    if found is None or math.prod(found["sizes"]) != places or windows.inputs[0].shape[0] != n:
        return None
    attrs = {**found, **{k: product.attrs[k] for k in ("finish",) if k in product.attrs}}
    return dataclasses.replace(
        product,
        type="convolution",
        inputs=(weight, windows.inputs[0], *others),
        attrs=attrs,
        after=(*windows.after, *product.after),
    )


def _scalar(node: Node) -> bool:
    return all(t.dtype.name == "fp32" for t in (*node.inputs[:2], *node.outputs))


def window(node: Node, groups: int) -> dict[str, Any] | None:
    """Size, stride, dilation, margins and places of windows that are written as index arithmetic;
    None where a rule is not a convolution's.
    """
    source: Tensor = node.inputs[0]
    count = len(source.shape) - 2
    shape, rules = node.attrs["shape"], node.attrs["rules"]
    each = source.shape[1] // groups if groups and source.shape[1] % groups == 0 else 0
    lead = [source.shape[0], groups, each]
    if not 1 <= count <= 2 or len(shape) != 3 + 2 * count or list(shape[:3]) != lead:
        return None
    if node.attrs["fill"] or rules[0] != [[[0, 1]], 0, 1, "fill"]:
        return None
    if rules[1] != [[[1, each], [2, 1]], 0, 1, "fill"]:
        return None
    steps: list[tuple[int, int, int]] = []  # stride, dilation, before
    for d, (terms, add, divide, _) in enumerate(rules[2:]):
        if divide != 1 or add > 0 or [t[0] for t in terms] != [3 + d, 3 + count + d]:
            return None
        (_, spread), (_, step) = terms
        if spread < 1 or step < 1:
            return None
        steps.append((step, spread, -add))
    stride, dilation, before = (list(each) for each in zip(*steps, strict=True))
    return {
        "size": list(shape[3 : 3 + count]),
        "stride": stride,
        "dilation": dilation,
        "before": before,
        "sizes": list(shape[3 + count :]),
    }
