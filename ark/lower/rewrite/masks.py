"""Masks that are computed from nothing but numbers, and so known before anything runs. Called by
ark.lower.rewrite.fuse_attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ark.ir.graph import Node
from ark.ir.values import Tensor
from ark.lower.registry import get
from ark.lower.rewrite.views import whole

MASKED = -6e4  # and less: such a score has no weight in any type
MOST_MASK = 1 << 24  # elements of a mask that is computed to look at it


class Masks:
    """makers: by buffer, the only node that writes it."""

    def __init__(self, makers: Mapping[int, Node]) -> None:
        self.makers = makers
        self._values: dict[int, np.ndarray | None] = {}  # by node: what numbers alone decide

    @property
    def known(self) -> frozenset[int]:
        """Ids of nodes that were found to have nothing but numbers as inputs."""
        return frozenset(number for number, made in self._values.items() if made is not None)

    def masked(self, node: Node, scale: float) -> tuple[Tensor, bool] | None:
        """The scores that the node masks, and whether it masks them causally or leaves all of them;
        None for any other node. scale: what its results are multiplied by.
        """
        if node.type not in ("where", "add") or len(node.inputs) != 2:
            return None
        out = node.outputs[0]
        for scores, mask in (node.inputs, node.inputs[::-1]):
            fits = scores.shape == out.shape
            seen = self._seen_keys(node, scores, mask, MASKED / scale) if fits else None
            if seen is None:
                continue
            if seen.all():
                return scores, False
            if (seen == np.tril(np.ones(seen.shape[1:], bool))).all():
                return scores, True
        return None

    def _seen_keys(
        self, node: Node, scores: Tensor, mask: Tensor, least: float
    ) -> np.ndarray | None:
        """By row, which keys the mask leaves: it gives others the score least, or less."""
        shape, own = scores.shape[-2:], (1, 1, *mask.shape)
        value = self._value(mask)
        if value is None or math.prod(own[:-2]) * math.prod(shape) > MOST_MASK:
            return None
        value = np.broadcast_to(value.reshape(own), (*own[:-2], *shape)).reshape(-1, *shape)
        if node.type == "add":
            seen = value == 0
            return seen if (value[~seen] <= least).all() else None
        wanted = ["where", ["input", node.inputs.index(mask)]]
        tree = node.pointwise.expr
        given: Any = ["input", node.inputs.index(scores)]
        if tree is None or tree[:2] != wanted or len(tree) != 4:
            return None
        low = next((t for t in tree[2:] if t[0] == "number" and t[1] <= least), None)
        if low is None or given not in tree[2:]:
            return None
        return value.astype(bool) if tree[2] == given else ~value.astype(bool)

    def _value(self, tensor: Tensor) -> np.ndarray | None:
        """The elements of what is computed from nothing but numbers."""
        node = self.makers.get(tensor.buffer.id)
        if node is None or len(node.outputs) != 1 or tensor.elements > MOST_MASK:
            return None
        out = node.outputs[0]
        if out.dtype != tensor.dtype or out.dtype.packed or not whole(out):
            return None
        if node.id not in self._values:
            reference = get(node.type).reference
            given = [self._value(t) for t in node.inputs]
            known = [g for g in given if g is not None]
            fits = reference is not None and len(known) == len(given)
            self._values[node.id] = reference(known, node.attrs)[0] if fits and reference else None
        made = self._values[node.id]
        if made is None:
            return None
        flat = np.ascontiguousarray(np.broadcast_to(made, out.shape)).reshape(-1)
        start = sum(o * s for o, s in zip(tensor.offsets, tensor.strides, strict=True))
        steps = [s * flat.itemsize for s in tensor.strides]
        return np.lib.stride_tricks.as_strided(flat[start:], tensor.shape, steps)
