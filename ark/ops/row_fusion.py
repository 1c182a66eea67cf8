"""The op `row_fusion`: elementwise ops on rows and sums over rows that ark.lower.rewrite.fuse_rows
fused.

Users cannot call it; this module has its NumPy reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.ir.attributes import RowFusionAttributes
from ark.lower.ops.row_fusion import lower_row_fusion, matrix_shape
from ark.lower.registry import register
from ark.tasks import expression


def _reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The outputs as matrices."""
    given = RowFusionAttributes.from_node(attrs)
    values: list[Any] = [a.reshape(matrix_shape(a.shape, given.columns)) for a in inputs]
    rows = max(len(value) for value in values)
    for word, tree in given.stages:
        result = expression.evaluate(tree, values)
        if word != "row":
            result = np.broadcast_to(result, (rows, given.columns))
        values.append(result.sum(1, keepdims=True) if word == "sum" else result)
    return [np.broadcast_to(values[n], (rows, values[n].shape[1])) for n in given.stores]


register("row_fusion", _reference, lower_row_fusion)
