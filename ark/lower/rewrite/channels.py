"""Convolutions whose channels come last, where matrix units multiply.

A convolution is written as a product with a matrix of windows of which each element lies apart from
its neighbours (ark.ops.windows). With the channels turned to be last, neighbours of the matrix are
neighbours of the input: it is copied by whole packs, and box copies can load it whatever the size
of the image. Turning input and weights costs a pass over each, the matrix of windows has as many
times the input's elements as a window has places. Called by ark.lower.prepare before the kernel
variant is chosen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor, dense_view
from ark.lower.rewrite.chains import read_once
from ark.lower.rewrite.views import whole
from ark.lower.rewrite.windows import window
from ark.lower.tiling import BOX_LINE
from ark.machine import Machine

LEAST_WORK = 1 << 24  # multiplications that are worth turning what they read


def channels_last(graph: Graph, machine: Machine, kept: frozenset[int]) -> Graph:
    """A copy of the graph with such convolutions. kept: ids of buffers that somebody else reads."""
    if machine.has("single_thread"):
        return graph
    private = read_once(graph, kept)
    windows: dict[int, tuple[int, Node]] = {}  # by buffer: place and node
    nodes: list[list[Node]] = []
    made = _Turned(graph)
    for node in graph.nodes:
        found = None
        if node.type == "remap" and private(node.outputs[0]) and whole(node.outputs[0]):
            windows[node.outputs[0].buffer.id] = (len(nodes), node)
        elif node.type == "matmul" and node.inputs[1].buffer.id in windows:
            place, before = windows[node.inputs[1].buffer.id]
            found = made.convolution(before, node)
            if found is not None:
                nodes[place] = found[0]
        nodes.append(found[1] if found is not None else [node])
    return graph.with_nodes(n for group in nodes for n in group)


class _Turned:
    """Makes the nodes of convolutions whose channels come last."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.number = max((n.id for n in graph.nodes), default=0)

    def convolution(self, windows: Node, product: Node) -> tuple[list[Node], list[Node]] | None:
        """What makes the windows, and what multiplies them; None where the product is none of
        windows, or too small.
        """
        weight, table = product.inputs
        found = _fits(windows, product)
        if found is None:
            return None
        (n, _, depth, places), rows = table.shape, weight.shape[2]
        source, dtype, taps = windows.inputs[0], table.dtype, math.prod(found["size"])
        channels = depth // taps
        inner = source.shape[2:]
        last = self._turn(windows, source, [n, channels, math.prod(inner)])
        copied = self._windows(windows, self._view(last.outputs[0], [n, *inner, channels]), found)
        kernel = self._taps_first(product, self._view(weight, [rows, channels, taps]))
        left = self._view(kernel.outputs[0], [1, 1, rows, depth])
        seen = copied.outputs[0]
        out = product.outputs[0]
        if places * dtype.itemsize % BOX_LINE == 0:
            inputs = (left, self._view(seen, [n, 1, places, depth]))
            multiplied = self._product(product, inputs, out)
            return [last, copied], [kernel, multiplied]
        # Rows of results that begin anywhere: the channels last there, too, and turned back.
        flat = (self._view(seen, [n * places, depth]), self._view(left, [rows, depth]))
        between = self.graph.tensor((n * places, rows), dtype, name=f"{product.name}.places")
        multiplied = self._product(product, flat, between)
        back = self._node(
            product,
            "transpose",
            self._view(between, [n, places, rows]),
            self._view(out, [n, rows, places]),
            {"perm": [0, 2, 1]},
        )
        return [last, copied], [kernel, multiplied, back]

    def _turn(self, like: Node, tensor: Tensor, shape: Sequence[int]) -> Node:
        """A tensor seen in three dimensions, the second behind the third."""
        first, channels, places = shape
        name = f"{like.name}.channels_last"
        out = self.graph.tensor((first, places, channels), tensor.dtype, name=name)
        return self._node(like, "transpose", self._view(tensor, shape), out, {"perm": [0, 2, 1]})

    def _taps_first(self, like: Node, weight: Tensor) -> Node:
        """(rows, taps, channels) of weights whose taps are too few for tiles of a transpose."""
        rows, channels, taps = weight.shape
        shape = [rows, taps, channels]
        name = f"{like.name}.channels_last"
        rules = [[[[d, 1]], 0, 1, "fill"] for d in (0, 2, 1)]
        out = self.graph.tensor(shape, weight.dtype, name=name)
        attrs = {"rules": rules, "fill": 0.0, "shape": shape}
        return self._node(like, "remap", weight, out, attrs)

    def _windows(self, node: Node, source: Tensor, found: dict[str, Any]) -> Node:
        """(n, places..., window..., channels) of an input whose channels are last."""
        count = len(found["size"])
        shape = [source.shape[0], *found["sizes"], *found["size"], source.shape[-1]]
        rules: list[Any] = [[[[0, 1]], 0, 1, "fill"]]
        for d in range(count):
            terms = [[1 + count + d, found["dilation"][d]], [1 + d, found["stride"][d]]]
            rules.append([terms, -found["before"][d], 1, "fill"])
        rules.append([[[1 + 2 * count, 1]], 0, 1, "fill"])
        out = self.graph.tensor(shape, source.dtype, name=node.name)
        return self._node(node, "remap", source, out, {"rules": rules, "fill": 0.0, "shape": shape})

    def _product(self, product: Node, inputs: tuple[Tensor, Tensor], out: Tensor) -> Node:
        attrs = {**product.attrs, "transpose_b": True}
        return dataclasses.replace(product, inputs=inputs, outputs=(out,), attrs=attrs)

    def _node(self, like: Node, type: str, source: Tensor, out: Tensor, attrs: Any) -> Node:
        """A node of one input in the place of another, behind what that comes after."""
        self.number += 1
        name = out.name or like.name
        return dataclasses.replace(
            like,
            id=self.number,
            type=type,
            name=name,
            inputs=(source,),
            outputs=(out,),
            attrs=attrs,
        )

    def _view(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """A whole tensor in another shape."""
        if tensor.shape == tuple(shape):
            return tensor
        view = dense_view(tensor, shape)
        assert view is not None  # all of a buffer is seen in any shape
        extents, buffer = view[0], tensor.buffer
        return self.graph.tensor(
            shape, tensor.dtype, buffer=buffer, extents=extents, name=tensor.name
        )


def _fits(windows: Node, product: Node) -> dict[str, Any] | None:
    """Of a product of 16-bit types whose channels fill packs and that is large enough: the windows;
    None of others.
    """
    if len(product.inputs) != 2 or windows.placement != product.placement or product.hints:
        return None
    weight, table, out = *product.inputs, product.outputs[0]
    plain = not product.attrs["transpose_a"] and not product.attrs["transpose_b"]
    types = {t.dtype.name for t in (weight, table, out)}
    if not plain or len(types) != 1 or not types <= {"bf16", "fp16"}:
        return None
    if not all(map(whole, (weight, windows.inputs[0], table, out))) or len(table.shape) != 4:
        return None
    n, groups, depth, places = table.shape
    found = window(windows, 1)
    if found is None or groups != 1 or weight.shape != (1, 1, weight.shape[2], depth):
        return None
    if math.prod(found["sizes"]) != places or windows.inputs[0].shape[0] != n:
        return None
    channels, rows = windows.inputs[0].shape[1], weight.shape[2]
    pack = BOX_LINE // table.dtype.itemsize
    large = n * rows * places * depth >= LEAST_WORK
    return found if large and channels % pack == rows % pack == 0 else None
