"""Lowering of three ops of a decoder: rotary embedding of rows, `rope_kv` (which rotates queries
and keys and appends to caches), and gates on pairs of columns.
"""

from __future__ import annotations

from ark.ir.attributes import ProjectionAttributes, RotaryAttributes
from ark.ir.fold import split
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.plan.params import Params
from ark.tasks.rotary import VECTOR_COLUMNS, RopeKvParams, RotaryEmbeddingParams


def lower_rotary_embedding(lowering: Lowering, node: Node) -> None:
    """Emits the tasks of a rotary embedding: one for each row and group of heads."""
    rows, columns = node.outputs[0].shape
    given = node.read(RotaryAttributes)
    parts = split(columns // given.head_dim, -(-lowering.machine.processors // rows))
    x, position, frequencies = node.inputs
    batch = position.shape[0]
    coords = [(r, a, b) for r in range(rows // batch) for a, b in parts]
    for b in range(batch):
        own = [lowering.part(t, batch, b) for t in (x, node.outputs[0], position)]
        lowering.emit(
            "rotary_embedding",
            RotaryEmbeddingParams(given.head_dim, given.interleaved),
            [*own, frequencies],
            coords,
        )


def lower_rope_kv(lowering: Lowering, node: Node) -> None:
    """Emits the tasks of `rope_kv`, which rotates queries and keys and appends keys and values to
    the caches. Each task computes some columns of all rows, because all rows of an iteration share
    the caches. If heads are normalised, these are columns of whole heads.
    """
    x = node.inputs[0]
    operands = [x, node.outputs[0], *node.inputs[1:], *node.outputs[1:]]
    # With several rows, a task begins at a column that is a multiple of the width of a vector
    # access, so that the task can load vectors.
    given = node.read(ProjectionAttributes)
    step = VECTOR_COLUMNS if x.shape[0] > 1 and given.head_dim % VECTOR_COLUMNS == 0 else 2
    step = given.head_dim if given.head_eps else step
    params = RopeKvParams(given.heads, given.kv_heads, given.head_dim, given.head_eps)
    parts = split(x.shape[1] // step, lowering.machine.processors)
    lowering.emit("rope_kv", params, operands, [(a * step, b * step) for a, b in parts])


def lower_swiglu_pairs(lowering: Lowering, node: Node) -> None:
    x = node.inputs[0]
    rows, width = x.shape
    parts = split(width // 2, -(-lowering.machine.processors // rows))
    coords = [(r, a * 2, b * 2) for r in range(rows) for a, b in parts]
    lowering.emit("swiglu_pairs", Params(), [x, node.outputs[0]], coords)
