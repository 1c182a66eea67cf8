"""Keeps the gradients of memory regions while a graph's ops are processed in reverse.

A tensor is a box (rectangular part) of a buffer, and views are not nodes of the graph. So a
gradient is stored for a box, not for a tensor. When the op that wrote a box is processed, the
gradient of this box is assembled from the stored gradients of all boxes that overlap it. The parts
of these gradients that lie outside of the box stay stored. Called by ark.ops.gradients.reverse.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ark.frontend.tensor import Tensor
from ark.ir import values as ir
from ark.ops.elementwise import add
from ark.ops.indexing import concat, pad
from ark.ops.views import reshape

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Part:
    """A box of a buffer and its gradient. extents: the sizes of the buffer's dimensions."""

    extents: tuple[int, ...]
    box: Box
    gradient: Tensor


def _box(tensor: ir.Tensor) -> Box:
    return tuple((o, o + n) for o, n in zip(tensor.offsets, tensor.shape, strict=True))


def _meet(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes."""
    overlap = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return overlap if all(x < y for x, y in overlap) else None


def _cut(part: _Part, box: Box) -> _Part:
    """The part of the gradient `part` that lies inside of a box."""
    if box == part.box:
        return part
    inner = tuple(
        slice(x[0] - start[0], x[1] - start[0]) for x, start in zip(box, part.box, strict=True)
    )
    return _Part(part.extents, box, part.gradient[inner])


def _beside(part: _Part, box: Box) -> list[_Part]:
    """The rest of the gradient `part`, without the elements inside of a box, as several parts that
    are boxes.
    """
    left, rest = part.box, []
    for d, (low, high) in enumerate(box):
        for begin, end in ((left[d][0], low), (high, left[d][1])):
            if begin < end:
                rest.append(_cut(part, (*left[:d], (begin, end), *left[d + 1 :])))
        left = (*left[:d], (low, high), *left[d + 1 :])
    return rest


def _filled(part: _Part, box: Box) -> Tensor:
    """The gradient of a box that contains `part`: the part's gradient, padded with zeros outside of
    the part.
    """
    pads = [(x[0] - y[0], y[1] - x[1]) for x, y in zip(part.box, box, strict=True)]
    return pad(part.gradient, pads) if any(p != (0, 0) for p in pads) else part.gradient


def _seen(part: _Part, tensor: ir.Tensor) -> _Part:
    """A gradient of a buffer's box, converted to the dimensions in which `tensor` views the
    buffer.
    """
    if part.extents == tensor.extents:
        return part
    shape = tuple(high - low for low, high in part.box)
    plain = ir.Tensor(
        0,
        tensor.dtype,
        shape,
        part.extents,
        tuple(low for low, _ in part.box),
        shape,
        tensor.buffer,
    )
    row = math.prod(tensor.extents[1:])
    for wanted in (tensor.shape, (plain.elements // row, *tensor.extents[1:])):
        layout = ir.dense_view(plain, wanted)
        if layout is not None and layout[0] == tensor.extents:
            box = tuple((o, o + n) for o, n in zip(layout[1], wanted, strict=True))
            return _Part(tensor.extents, box, reshape(part.gradient, wanted))
    whole = _filled(part, tuple((0, n) for n in part.extents))
    return _Part(
        tensor.extents, tuple((0, n) for n in tensor.extents), reshape(whole, tensor.extents)
    )


class Regions:
    """The gradients computed so far, stored for boxes of the buffers of one model."""

    def __init__(self) -> None:
        self._parts: dict[int, list[_Part]] = {}

    def put(self, tensor: ir.Tensor, gradient: Tensor) -> None:
        """Adds to a tensor's gradient."""
        parts = self._parts.setdefault(tensor.buffer.id, [])
        parts.append(_Part(tensor.extents, _box(tensor), gradient))

    def look(self, tensor: ir.Tensor) -> Tensor | None:
        """A tensor's gradient; None if no output depends on it."""
        return self._find(tensor)[0]

    def take(self, tensor: ir.Tensor) -> Tensor | None:
        """Returns a tensor's gradient, as `look` does, and removes it from the stored gradients."""
        gradient, rest = self._find(tensor)
        self._parts[tensor.buffer.id] = rest
        return gradient

    def drop(self, tensor: ir.Tensor) -> None:
        """Removes the gradient of a tensor's box."""
        if self._parts.get(tensor.buffer.id):
            self._parts[tensor.buffer.id] = self._split(tensor)[1]

    def _find(self, tensor: ir.Tensor) -> tuple[Tensor | None, list[_Part]]:
        """The gradient of a tensor's box, and the stored parts outside of this box."""
        inside, rest = self._split(tensor)
        return _sum(inside, _box(tensor)), rest

    def _split(self, tensor: ir.Tensor) -> tuple[list[_Part], list[_Part]]:
        """The known parts of a tensor's buffer, divided into those inside of the tensor's box and
        those outside of it.
        """
        wanted = _box(tensor)
        inside: list[_Part] = []
        rest: list[_Part] = []
        for part in _joined(self._parts.get(tensor.buffer.id, []), tensor.extents):
            part = _seen(part, tensor)
            shared = _meet(part.box, wanted)
            if shared is None:
                rest.append(part)
                continue
            inside.append(_cut(part, shared))
            rest += _beside(part, shared)
        return inside, rest


def _joined(parts: Sequence[_Part], extents: tuple[int, ...]) -> list[_Part]:
    """The parts of a buffer, some of them joined. If parts with dimensions other than `extents`
    together form the whole buffer, they are concatenated in their own dimensions.

    For example, a column block of (4, 512, 2304) is not a box of (2048, 2304). Without this
    function, each such block would be padded with zeros and added.
    """
    groups: dict[tuple[int, ...], list[_Part]] = {}
    for part in parts:
        groups.setdefault(part.extents, []).append(part)
    joined: list[_Part] = []
    for dimensions, group in groups.items():
        whole = tuple((0, n) for n in dimensions)
        boxes = list(dict.fromkeys(part.box for part in group))
        if dimensions != extents and _row(boxes, whole) is not None:
            gradient = _sum(group, whole)
            assert gradient is not None
            group = [_Part(dimensions, whole, gradient)]
        joined += group
    return joined


def _sum(parts: Sequence[_Part], box: Box) -> Tensor | None:
    """The gradient of a box, computed from the stored parts inside of it. None if there are no
    parts.

    Parts with equal boxes are added. The sums are then concatenated or padded with zeros to form
    the box.
    """
    groups: dict[Box, Tensor] = {}
    for part in parts:
        present = groups.get(part.box)
        groups[part.box] = part.gradient if present is None else add(present, part.gradient)
    axis = _row(list(groups), box)
    if axis is not None:
        return concat([groups[inner] for inner in sorted(groups)], axis)
    total: Tensor | None = None
    for inner, gradient in groups.items():
        whole = _filled(_Part((), inner, gradient), box)
        total = whole if total is None else add(total, whole)
    return total


def _row(boxes: Sequence[Box], whole: Box) -> int | None:
    """The axis along which the boxes, concatenated in order, form the whole box.

    None if they do not, or there is only one.
    """
    for axis in range(len(whole)):
        ends = sorted(box[axis] for box in boxes)
        aligned = all(b[:axis] + b[axis + 1 :] == whole[:axis] + whole[axis + 1 :] for b in boxes)
        joined = all(x[1] == y[0] for x, y in itertools.pairwise(ends))
        if len(boxes) > 1 and aligned and joined and (ends[0][0], ends[-1][1]) == whole[axis]:
            return axis
    return None
