"""Ops that add up the partial sums of a matmul whose inner dimension k was split (split-K).

add_parts_norm also computes the rmsnorm of the rows. The nodes are added by the passes
ark.lower.rewrite.cut_products and fuse_parts_norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.ir.attributes import AddPartsAttributes, NormAttributes
from ark.lower.ops.parts import lower_add_parts, lower_add_parts_norm
from ark.lower.registry import register
from ark.tasks import expression


def _added(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    sums, *others = inputs
    return [expression.evaluate(AddPartsAttributes.from_node(attrs).expr, [*sums, *others])]


def _added_and_normed(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    sums, *others, weight = inputs
    total = sum(others, sums.sum(0))
    eps = NormAttributes.from_node(attrs).eps
    root = np.sqrt((total * total).mean(-1, keepdims=True) + eps)
    return [total, total / root * weight]


register("add_parts", _added, lower_add_parts, aliasing="exact")
register("add_parts_norm", _added_and_normed, lower_add_parts_norm)
