"""Lowering of the op that adds the partial sums of a product whose inner dimension k was divided
into parts (split-k), with or without the norm that follows.
"""

from __future__ import annotations

from ark.ir.attributes import AddPartsAttributes, NormAttributes
from ark.ir.fold import fold, split
from ark.ir.graph import Node
from ark.lower.context import Lowering
from ark.lower.merge import part, widen
from ark.lower.tiling import box_coords
from ark.tasks.combine_norm import CombineNormParams
from ark.tasks.elementwise import ElementwiseParams


def lower_add_parts(lowering: Lowering, node: Node) -> None:
    """Emits tasks that add the partial sums of all parts of k. Each tile of the product is divided
    among several tasks, as many as there are parts of k.
    """
    (sums, *others), out = node.inputs, node.outputs[0]
    parts, m, n = sums.shape
    given = node.read(AddPartsAttributes)
    rows, columns = given.tile
    views = [part(sums, 0, i, 1) for i in range(parts)]
    wide = [widen(t, 3) if len(t.shape) < 3 else t for t in (*others, out)]
    tile = (1, 1, -(-min(rows, m) // parts), min(columns, n))
    coords = box_coords(fold(wide[-1].shape), tile)
    params = ElementwiseParams(given.expr, tile)
    lowering.emit("elementwise", params, [*views, *wide], coords)


def lower_add_parts_norm(lowering: Lowering, node: Node) -> None:
    """Emits tasks that add the partial sums of all parts of k for whole rows, and normalise the
    rows. Results are the sums and the normalised rows.
    """
    (sums, *others, weight), (total, normed) = node.inputs, node.outputs
    columns = total.shape[-1]
    shares = [*(part(sums, 0, i, 1) for i in range(sums.shape[0])), *others]
    params = CombineNormParams("fp32", columns, node.read(NormAttributes).eps)
    operands = [*map(lowering.flat, shares), weight, *map(lowering.flat, (total, normed))]
    rows = split(total.elements // columns, lowering.machine.processors)
    lowering.emit("combine_norm", params, operands, [(a * columns, b * columns) for a, b in rows])
