"""Lowering of linear layers with quantised weights."""

from __future__ import annotations

from ark.ir.attributes import GroupAttributes
from ark.ir.fold import split
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.lower.merge import part
from ark.plan.params import Params
from ark.tasks.quantized_linear import QuantizedLinearParams, most_rows


def lower_quantized_linear(lowering: Lowering, node: Node) -> None:
    """Emits a quantised linear layer. If its input rows do not fit in a processor's shared memory,
    the layer is emitted once for each group of rows that fits.
    """
    x, *others = node.inputs
    out, machine = node.outputs[0], lowering.machine
    coords = split(others[0].shape[0], machine.processors)
    most = most_rows(x.shape[1], machine)
    for number, first in enumerate(range(0, x.shape[0], most)):
        rows = min(most, x.shape[0] - first)
        operands = [part(x, 0, first, rows), *others, part(out, 0, first, rows)]
        lowering.emit(
            "quantized_linear",
            QuantizedLinearParams(group=node.read(GroupAttributes).group),
            operands,
            coords,
            f".{number}" if number else "",
        )


def lower_row_values(lowering: Lowering, node: Node) -> None:
    """Emits tasks that each dequantise a range of rows of a matrix."""
    coords = split(node.inputs[0].shape[0], lowering.machine.processors)
    lowering.emit("row_values", Params(), [*node.inputs, *node.outputs], coords)
