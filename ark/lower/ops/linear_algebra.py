"""Lowering of linear layers, including the ops fused with them."""

from __future__ import annotations

from msgspec import structs

from ark.errors import ModelError
from ark.ir.attributes import LinearAttributes
from ark.ir.dtype import RowType
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.tasks.linear_form import LinearParams, layer_tiles


def lower_linear(lowering: Lowering, node: Node) -> None:
    """Emits the tasks of a linear layer of few rows. Each task computes the outputs of some rows of
    the weight, which it streams (copies to shared memory in stages, ahead of the computation).
    Raises ModelError if the weight is not dense.
    """
    weight = node.inputs[1]
    if not weight.dense:
        raise ModelError(f"the weight {weight.name!r} must be dense to be streamed")
    rows, splits, coords = layer_tiles(node, lowering.machine)
    x, w, *rest = node.inputs
    operands = [x, w, node.outputs[0], *rest, *node.outputs[1:]]
    given = node.read(LinearAttributes)
    kept = {name: value for name, value in structs.asdict(given).items() if name != "counter"}
    params = LinearParams(rows=rows, split_k=splits, **kept)
    kind = "linear_rows" if isinstance(w.dtype, RowType) else "linear"
    group = lowering.emit(kind, params, operands, coords)
    if given.counter:
        group.sends = [lowering.peer_counters(given.counter)] * len(coords)
