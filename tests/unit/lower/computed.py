"""The result of a graph in fp32 by the references of its nodes, so that a rewrite can be compared
with NumPy without a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ark.ir.graph import Graph
from ark.ir.values import Tensor
from ark.lower import registry as ops


def computed(graph: Graph, inputs: Mapping[int, np.ndarray], result: Tensor) -> np.ndarray:
    """Runs a graph by its nodes' references. Returns the elements of one result tensor. inputs: the
    contents of input buffers, by their ids.
    """
    memory = {number: value.reshape(-1) for number, value in inputs.items()}
    for node in graph.nodes:
        reference = ops.get(node.type).reference
        if reference is not None and not node.virtual:
            value = reference([_seen(t, memory) for t in node.inputs], node.attrs)[0]
            out = _seen(node.outputs[0], memory)
            out[...] = value.reshape(out.shape)
    return _seen(result, memory)


def _seen(tensor: Tensor, memory: dict[int, np.ndarray]) -> np.ndarray:
    """Returns the tensor's elements as a view of its buffer's contents."""
    flat = memory.setdefault(tensor.buffer.id, np.zeros(tensor.buffer.nbytes // 4, np.float32))
    start = sum(o * s for o, s in zip(tensor.offsets, tensor.strides, strict=True))
    steps = [4 * s for s in tensor.strides]
    return np.lib.stride_tricks.as_strided(flat[start:], tensor.shape, steps)
