"""Lowering of `row_fusion` nodes: elementwise ops on rows and sums over rows, in one task."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ark.ir.attributes import RowFusionAttributes
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.tasks.row_fusion import RowFusionParams


def matrix_shape(shape: Sequence[int], columns: int) -> tuple[int, int]:
    """The shape of an operand as a matrix: its last dimension has `columns` columns or one."""
    wide = shape[-1] == columns
    return math.prod(shape) // (columns if wide else 1), columns if wide else 1


def lower_row_fusion(lowering: Lowering, node: Node) -> None:
    """Emits the tasks of a `row_fusion` node, each of which computes some of the rows."""
    given, machine = node.read(RowFusionAttributes), lowering.machine
    tensors = [
        lowering.view(t, matrix_shape(t.shape, given.columns))
        for t in (*node.inputs, *node.outputs)
    ]
    count = tensors[-1].shape[0]
    least = -(-machine.costs.tile_elements // (len(tensors) * given.columns))
    rows = min(count, max(least, -(-count // machine.processors)))
    stages = [(word, list(tree)) for word, tree in given.stages]
    params = RowFusionParams(len(node.inputs), given.columns, rows, stages, given.stores)
    coords = [(0, 0, first, 0) for first in range(0, count, rows)]
    lowering.emit("row_fusion", params, tensors, coords)
