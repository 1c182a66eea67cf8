"""The op `fusion`: a region of elementwise ops and sums that ark.lower.rewrite.fuse_regions fused.

Users cannot call it; this module has its NumPy reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.ir.attributes import FusionAttributes
from ark.ir.fold import MAX_FOLDED_DIMS
from ark.lower.ops.fusion import lower_fusion
from ark.lower.registry import register
from ark.tasks import expression
from ark.tasks.fusion import STAGES


def _reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    values, given = list(inputs), FusionAttributes.from_node(attrs)
    for stage in STAGES:
        for tree in getattr(given, stage):
            result = expression.evaluate(tree, values)
            values.append(_summed(result, given) if stage == "sums" else result)
    return [values[number] for number in given.stores]


def _summed(values: np.ndarray, given: FusionAttributes) -> np.ndarray:
    """The sums over the region's axis. Values that are equal along it are added `count` times."""
    along = given.axis - MAX_FOLDED_DIMS
    whole = -along <= values.ndim and values.shape[along] == given.count
    return np.asarray(values.sum(along, keepdims=True) if whole else values * given.count)


register("fusion", _reference, lower_fusion)
