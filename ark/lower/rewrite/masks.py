"""Recognises the nodes that mask attention scores. A mask that depends only on constants is
computed while planning: it may be causal, or mask nothing. Any other mask becomes a tensor that the
attention op reads. Called by ark.lower.rewrite.fuse_attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ark.ir.attributes import MaskForm
from ark.ir.dtype import FLOATS, DataType, bool_
from ark.ir.graph import Node
from ark.ir.values import Tensor
from ark.lower.registry import get
from ark.lower.rewrite.views import in_shape, same_elements, whole

MAX_MASKED_SCORE = -6e4  # a score of at most this has the weight 0 in every type
MAX_COMPUTED_MASK_ELEMENTS = 1 << 24  # elements of a mask that is computed while planning


@dataclass(frozen=True)
class Mask:
    """A mask that attention reads as a tensor. reader: the node that reads it in the original
    graph. form, fill: see ark.ir.attributes.AttentionAttributes. leads: the sizes of the scores'
    leading dimensions, without the last two (rows and keys). scores: the type of the scores.
    """

    tensor: Tensor
    reader: Node
    form: MaskForm
    fill: float
    leads: tuple[int, ...]
    scores: DataType

    def by_head(self, batch: int, heads: int) -> Tensor | None:
        """The mask viewed as (batch, heads, rows, keys). A size is 1 where the mask is the same for
        all indices. If the same masks repeat along the batch, as those of an image's windows do,
        the view has only as many as differ, a divisor of `batch`. None if the mask has no such
        view.
        """
        shape = (1,) * (len(self.leads) + 2 - len(self.tensor.shape)) + self.tensor.shape
        lead, count = shape[:-2], math.prod(shape[:-2])
        sizes = (1, 1) if count == 1 else (batch, heads)
        for k in range(len(lead) + 1):
            if (math.prod(self.leads[:k]), math.prod(self.leads[k:])) == (batch, heads):
                sizes = (math.prod(lead[:k]), math.prod(lead[k:]))
                ones = next((d for d in range(k) if lead[d] > 1), k)
                if lead[ones:k] != self.leads[ones:k]:
                    return None  # the batch's indices do not repeat
        fits = batch % sizes[0] == 0 and sizes[1] in (1, heads) and math.prod(sizes) == count
        return in_shape(self.tensor, (*sizes, *shape[-2:]), named=True) if fits else None


class Masks:
    """Recognises masks of attention scores. makers: by buffer id, the buffer's only writer."""

    def __init__(self, makers: Mapping[int, Node]) -> None:
        self.makers = makers
        self._values: dict[int, np.ndarray | None] = {}  # by node: values of constants

    @property
    def known(self) -> frozenset[int]:
        """Ids of the nodes that were found to depend only on constants, so that their values are
        known.
        """
        return frozenset(number for number, value in self._values.items() if value is not None)

    def masked(self, node: Node, scale: float) -> tuple[Tensor, bool] | None:
        """If the node applies a constant mask to scores: the scores that it reads, and True for a
        causal mask or False for a mask that masks nothing. None for any other node. scale: the
        factor by which the masked scores are multiplied later.
        """
        if node.type not in ("where", "add") or len(node.inputs) != 2:
            return None
        out = node.outputs[0]
        for scores, mask in (node.inputs, node.inputs[::-1]):
            fits = scores.shape == out.shape
            seen = self._seen_keys(node, scores, mask, MAX_MASKED_SCORE / scale) if fits else None
            if seen is None:
                continue
            if seen.all():
                return scores, False
            if (seen == np.tril(np.ones(seen.shape[1:], bool))).all():
                return scores, True
        return None

    def read(self, node: Node, scale: float) -> tuple[Tensor, Mask] | None:
        """If the node applies a mask to scores: the scores that it reads, and the mask. None for
        any other node. scale: the factor by which the masked scores are multiplied later.
        """
        if node.type not in ("where", "add") or len(node.inputs) != 2:
            return None
        out = node.outputs[0]
        for i, scores in enumerate(node.inputs):
            mask = node.inputs[1 - i]
            if scores.shape != out.shape or scores.dtype not in FLOATS:
                continue
            if node.type == "add":
                if scale == 1.0 and mask.dtype in FLOATS and node.elementwise.expr is None:
                    source, reader = self._before_cast(mask, node)
                    given = out.shape[:-2], scores.dtype
                    return scores, Mask(source, reader, "added", -math.inf, *given)
                continue
            kept, tree = ["input", i], node.elementwise.expr
            if mask.dtype != bool_ or not isinstance(tree, list) or len(tree) != 4:
                continue
            low = next((t for t in tree[2:] if t[0] == "number" and t[1] < math.inf), None)
            if tree[:2] == ["where", ["input", 1 - i]] and low is not None and kept in tree[2:]:
                form: MaskForm = "seen" if tree[2] == kept else "hidden"
                fill = float(low[1]) * scale
                return scores, Mask(mask, node, form, fill, out.shape[:-2], scores.dtype)
        return None

    def _before_cast(self, mask: Tensor, reader: Node) -> tuple[Tensor, Node]:
        """If the mask is the result of a cast that loses no precision, the cast's source and the
        cast; otherwise the mask itself and its reader.
        """
        node = self.makers.get(mask.buffer.id)
        if node is None or node.type != "cast" or not same_elements(mask, node.outputs[0]):
            return mask, reader
        source = node.inputs[0]
        fits = source.dtype in FLOATS and source.dtype.itemsize <= mask.dtype.itemsize
        return (source, node) if fits and source.shape == mask.shape else (mask, reader)

    def _seen_keys(
        self, node: Node, scores: Tensor, mask: Tensor, least: float
    ) -> np.ndarray | None:
        """For each row of scores, which keys stay visible (a bool array) under a constant mask that
        sets all other scores to at most `least`. None if the mask is not constant or does not have
        this form.
        """
        shape, own = scores.shape[-2:], (1, 1, *mask.shape)
        value = self._value(mask)
        if value is None or math.prod(own[:-2]) * math.prod(shape) > MAX_COMPUTED_MASK_ELEMENTS:
            return None
        value = np.broadcast_to(value.reshape(own), (*own[:-2], *shape)).reshape(-1, *shape)
        if node.type == "add":
            seen = value == 0
            return seen if (value[~seen] <= least).all() else None
        wanted = ["where", ["input", node.inputs.index(mask)]]
        tree = node.elementwise.expr
        given: Any = ["input", node.inputs.index(scores)]
        if tree is None or tree[:2] != wanted or len(tree) != 4:
            return None
        low = next((t for t in tree[2:] if t[0] == "number" and t[1] <= least), None)
        if low is None or given not in tree[2:]:
            return None
        return value.astype(bool) if tree[2] == given else ~value.astype(bool)

    def _value(self, tensor: Tensor) -> np.ndarray | None:
        """The elements of a tensor that is computed from constants only; None for any other
        tensor.
        """
        node = self.makers.get(tensor.buffer.id)
        if node is None or len(node.outputs) != 1 or tensor.elements > MAX_COMPUTED_MASK_ELEMENTS:
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
        value = self._values[node.id]
        if value is None:
            return None
        flat = np.ascontiguousarray(np.broadcast_to(value, out.shape)).reshape(-1)
        start = sum(o * s for o, s in zip(tensor.offsets, tensor.strides, strict=True))
        steps = [s * flat.itemsize for s in tensor.strides]
        return np.lib.stride_tricks.as_strided(flat[start:], tensor.shape, steps)
