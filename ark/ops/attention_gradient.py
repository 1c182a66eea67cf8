"""The gradients of attention as one op, which only ark.lower.rewrite.fuse_attention creates: its
definition in NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.ir.attributes import AttentionAttributes
from ark.lower.ops.attention_gradient import lower_attention_gradient
from ark.lower.registry import register


def attention_gradient_reference(
    inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]
) -> list[np.ndarray]:
    """The gradients of queries, keys and values. inputs: queries, keys, values and the gradient of
    the result, each (batch, rows, heads * width); of each row the logarithm of its sum of
    exponentials and the product of the result and its gradient, (batch, rows, heads); a mask.
    """
    how = AttentionAttributes.from_node(attrs)

    def by_head(flat: np.ndarray) -> np.ndarray:
        split = flat.reshape(*flat.shape[:-1], how.heads, -1)
        return np.moveaxis(split, -2, 1).astype(np.float64)

    def by_row(split: np.ndarray) -> np.ndarray:
        moved = np.moveaxis(split, 1, -2)
        return moved.reshape(*moved.shape[:-2], -1)

    query, key, value, given, logarithms, slopes = (by_head(t) for t in inputs[:6])
    scores = query @ np.moveaxis(key, -1, -2) * how.scale
    if how.mask == "added":
        scores = scores + np.resize(inputs[6], (len(scores), *inputs[6].shape[1:]))
    elif how.mask:
        mask = np.resize(inputs[6], (len(scores), *inputs[6].shape[1:]))
        scores = np.where(mask == (how.mask == "seen"), scores, how.fill)
    if how.causal:
        scores = np.where(np.tri(*scores.shape[-2:]) > 0, scores, -np.inf)
    weights = np.exp(scores - logarithms)
    products = given @ np.moveaxis(value, -1, -2)
    slope = weights * (products - slopes) * how.scale
    turned, weighed = (np.moveaxis(t, -1, -2) for t in (slope, weights))
    return [by_row(t) for t in (slope @ key, turned @ query, weighed @ given)]


register(
    "attention_gradient", attention_gradient_reference, lower_attention_gradient, aliasing="none"
)
