"""Changes the shape of an elementwise op, so that it can be fused with a neighbour of another
shape. Front ends view the same elements in several shapes: by rows, by batch, or as an image. If an
op reads all elements of another op's result in another shape, one of the two ops can be changed to
the shape of the other, with all of its operands viewed in that shape. Called by
ark.lower.rewrite.fuse_chains and ark.lower.rewrite.fuse_epilogues.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from ark.ir.graph import Node
from ark.ir.values import Tensor, dense_view

Shape = Sequence[int]

# Arenas (kinds of memory) whose tensors users cannot look up by name.
UNSEEN = ("activation", "external")


def whole(tensor: Tensor) -> bool:
    """True if the tensor is contiguous and covers its buffer."""
    return tensor.dense and tensor.nbytes == tensor.buffer.nbytes


def same_elements(read: Tensor, written: Tensor) -> bool:
    """True if both tensors view the whole of the same buffer with the same element type. Their
    shapes may differ.
    """
    one = read.buffer.id == written.buffer.id and read.dtype == written.dtype
    return one and whole(read) and whole(written)


def seen_in(node: Node, shape: Shape, named: bool = False) -> Node | None:
    """A copy of the elementwise node whose result has this shape; None if an operand cannot be
    viewed accordingly. named: True if tensors that users can look up by name may change their
    shape.
    """
    out = node.outputs[0]
    if out.shape == tuple(shape):
        return node
    if node.hints is not None or math.prod(shape) != out.elements:
        return None
    operands = [_seen(t, out.shape, shape, named) for t in (*node.inputs, out)]
    if any(t is None for t in operands):
        return None
    *inputs, result = (t for t in operands if t is not None)
    return dataclasses.replace(node, inputs=tuple(inputs), outputs=(result,))


def in_shape(tensor: Tensor, shape: Shape, named: bool = False) -> Tensor | None:
    """The tensor in another shape with the same number of elements; None if no such view exists.
    named: True if a tensor that can be looked up by name may change its shape.
    """
    view = dense_view(tensor, shape)
    unnamed = not named and tensor.buffer.arena not in UNSEEN
    if view is None or unnamed or tensor.padded != tensor.shape:
        return None
    extents, offsets = view
    size = tuple(shape)
    return dataclasses.replace(tensor, shape=size, extents=extents, offsets=offsets, padded=size)


def _seen(tensor: Tensor, shape: Shape, wanted: Shape, named: bool) -> Tensor | None:
    """A view of an operand for an elementwise op whose result changes from `shape` to `wanted`. The
    tensor broadcasts to `shape`, the view to `wanted`. If dimensions are merged or divided, the
    operand must have all of their elements or be broadcast along all of them. None if there is no
    such view.
    """
    aligned = (1,) * (len(shape) - len(tensor.shape)) + tensor.shape
    dims: list[int] = []
    for old, new in groups(shape, wanted):
        sizes = aligned[old.start : old.stop]
        if sizes == tuple(shape[old.start : old.stop]):
            dims += wanted[new.start : new.stop]
        elif all(n == 1 for n in sizes):
            dims += [1] * len(new)
        else:
            return None
    return in_shape(tensor, dims, named)


def groups(a: Shape, b: Shape) -> Iterator[tuple[range, range]]:
    """Divides the dimensions of two shapes with equally many elements into matching groups. Both
    groups of a pair have the same number of elements, and groups are as short as possible. For
    example, (6, 4) and (2, 3, 4) give ((6), (2, 3)) and ((4), (4)).
    """
    i = j = 0
    while i < len(a) or j < len(b):
        first, second = i, j
        x = y = 1
        if i < len(a):
            x, i = a[i], i + 1
        if j < len(b):
            y, j = b[j], j + 1
        while x != y:
            if x < y:
                x, i = x * a[i], i + 1
            else:
                y, j = y * b[j], j + 1
        yield range(first, i), range(second, j)
