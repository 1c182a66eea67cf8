"""Ops that add up the sums of a product's parts of k, optionally with the norm of the rows.
ark.lower.rewrite.cut_products and fuse_parts_norm make these nodes.
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
