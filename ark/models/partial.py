"""Checks for tensor parallelism that the results of a module can be summed over ranks, and refuses
other modules. Called by ark.models.shard.

Attention and the feed-forward part end with a matmul whose weight is divided along its inner
dimension, and the ranks' results are summed. So all operations of the module after this matmul must
be linear. If they add a tensor, such as a bias, each rank must hold only a part of it; otherwise
the tensor would be added once for each rank.
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
    """Raises InvalidUsageError unless the sum of the outputs of all ranks is the output of the
    undivided module.

    shared: the ids of the buffers whose parameters are divided among ranks.
    """
    nodes = output.model.graph.nodes

    def faulty(tensor: Tensor) -> str:
        """The op or parameter because of which the ranks' tensors cannot be summed; empty if they
        can be.
        """
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
            return ""  # the sum over ranks has the whole bias
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
