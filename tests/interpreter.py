"""Runs a graph in NumPy in float64, node after node by the ops' references. It defines the expected
result of a graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ark.ir.dtype import INTEGERS
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower import registry
from ark.lower.rewrite.fuse_chains import is_elementwise


class Interpreter:
    """The memory of a graph's buffers. Contents are float64, or int64 for integer types."""

    def __init__(self) -> None:
        self.buffers: dict[int, np.ndarray] = {}

    def view(self, tensor: Tensor) -> np.ndarray:
        """Returns the elements of a tensor, as a view of its buffer."""
        kind = np.int64 if tensor.dtype in INTEGERS else np.float64
        size = tensor.buffer.nbytes // tensor.dtype.itemsize
        flat = self.buffers.setdefault(tensor.buffer.id, np.zeros(size, kind))
        count = int(np.prod(tensor.extents))
        box = tuple(slice(o, o + n) for o, n in zip(tensor.offsets, tensor.shape, strict=True))
        return flat[:count].reshape(tensor.extents)[box]

    def run(self, graph: Graph, phase: int) -> None:
        """Runs one iteration of a phase."""
        for node in graph.nodes:
            if node.phase == phase and not node.virtual:
                self.step(node)

    def step(self, node: Node) -> None:
        """Runs one node."""
        define = registry.get(node.type).reference
        assert define is not None, f"{node.type} has no reference"
        inputs = [self.view(t).copy() for t in node.inputs]
        attrs = node.attrs
        if attrs.get("expr") and node.type != "expert_linear" and is_elementwise(node):
            attrs = {**attrs, "shape": node.outputs[0].shape}
        result = define(inputs, attrs)
        targets: list[Any] = list(node.outputs)
        if "rope_kv" in (node.type, node.attrs.get("epilogue")):
            # For a single row the op also gets the new key and value as inputs and writes them to
            # the caches, which are inputs, too.
            caches = [t for t in node.inputs if len(t.shape) >= 3]
            targets = [node.outputs[0], *(node.outputs[1:] or [None]), *caches]
        for target, array in zip(targets, result, strict=True):
            if target is not None:
                self.view(target)[...] = np.reshape(array, target.shape)
