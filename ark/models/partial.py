"""Refuses parts of a decoder whose results ranks cannot add. Called by ark.models.shard.

Attention and the feed-forward part end with a product whose weight the ranks share along its inner
dimension: the ranks add their results. What a module computes behind that product must be linear,
and what it adds must be shared too, else it is added once for each rank.
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any

import ark
from ark.errors import InvalidUsageError
from ark.ir.values import Tensor

PRODUCTS = ("matmul", "expert_linear")
LINEAR_IN_FIRST = ("cast", "copy", "gather", "neg", "reduce_sum", "transpose")
SUMS = ("add", "sub")


def check_sum(module: Any, output: ark.Tensor, shared: Set[int], world_size: int) -> None:
    """InvalidUsageError unless the module's output is a sum over ranks.

    shared: the ids of the buffers of parameters that ranks share.
    """
    nodes = output.model.graph.nodes

    def faulty(tensor: Tensor) -> str:
        """Why ranks cannot add their tensors: an op, or a parameter; empty if they can."""
        place = tensor.buffer.id
        writers = (n for n in reversed(nodes) if any(t.buffer.id == place for t in n.outputs))
        node = next(writers, None)
        if node is None:
            return "a parameter that every rank holds whole"
        inputs = node.inputs
        if node.type in PRODUCTS:
            return "" if any(t.buffer.id in shared for t in inputs) else f"{node.type} {node.name}"
        if node.type in SUMS and len(inputs) == 2:
            return faulty(inputs[0]) or faulty(inputs[1])
        if node.type == "mul" and len(inputs) == 2:
            return faulty(inputs[0]) and faulty(inputs[1])
        if node.type == "mul" and math.isclose(node.elementwise.scalar or 0.0, 1 / world_size):
            return ""  # a bias of which each rank adds its share
        if node.type in LINEAR_IN_FIRST:
            return faulty(inputs[0])
        return f"{node.type} {node.name}"

    fault = faulty(output.ir)
    if fault:
        raise InvalidUsageError(
            f"the result of {type(module).__name__}.forward is added over {world_size} ranks, but "
            f"it has {fault}, which ranks do not share: move what follows the last product to the "
            "layer's forward, use --split megatron, or use one rank"
        )
