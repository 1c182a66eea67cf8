"""Merges neighbouring dimensions of an op's tensors, if the memory layout of all tensors allows it.
Device functions loop over four dimensions and compute the indices of further dimensions by
division, which is slow. Most tensors with more than four dimensions can be viewed with four,
because they are dense, or broadcast along several neighbouring dimensions. Called by the ops'
lowerings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ark.ir.dtype import uint8
from ark.ir.values import Tensor
from ark.lower.tiling import MAX_COORDINATE


def _each(tensor: Tensor, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Tensor:
    """The tensor with each of its lists of sizes changed in the same way."""
    lists = (tensor.shape, tensor.extents, tensor.offsets, tensor.padded)
    shape, extents, offsets, padded = map(change, lists)
    return dataclasses.replace(tensor, shape=shape, extents=extents, offsets=offsets, padded=padded)


def widen(tensor: Tensor, rank: int) -> Tensor:
    """The tensor viewed with `rank` dimensions: dimensions of size 1 are added in front."""
    more = rank - len(tensor.shape)
    return dataclasses.replace(
        tensor,
        shape=(1,) * more + tensor.shape,
        extents=(1,) * more + tensor.extents,
        offsets=(0,) * more + tensor.offsets,
        padded=(1,) * more + tensor.padded,
    )


def bytes_of(tensor: Tensor) -> Tensor:
    """A tensor with several elements per byte, viewed as a tensor of bytes; any other tensor
    unchanged.
    """
    each = tensor.dtype.per_item
    if each == 1:
        return tensor
    items = _each(tensor, lambda values: (*values[:-1], -(-values[-1] // each)))
    return dataclasses.replace(items, dtype=uint8)


def part(tensor: Tensor, axis: int, at: int, size: int) -> Tensor:
    """A view of the part of the tensor with the indices from `at` to `at + size - 1` in dimension
    `axis`.
    """

    def put(values: Sequence[int], value: int) -> tuple[int, ...]:
        return (*values[:axis], value, *values[axis + 1 :])

    return dataclasses.replace(
        tensor,
        shape=put(tensor.shape, size),
        padded=put(tensor.padded, size),
        offsets=put(tensor.offsets, tensor.offsets[axis] + at),
    )


def without(tensor: Tensor, d: int) -> Tensor:
    """A view of the tensor without dimension d, which must have a single index."""
    return _each(tensor, lambda values: (*values[:d], *values[d + 1 :]))


def join(tensor: Tensor, d: int) -> Tensor:
    """The tensor with dimensions d and d + 1 merged into one; `joins` must hold."""

    def one(values: Sequence[int], size: int) -> tuple[int, ...]:
        return (*values[:d], size, *values[d + 2 :])

    shape = tensor.shape[d] * tensor.shape[d + 1]
    inner = tensor.extents[d + 1]
    return dataclasses.replace(
        tensor,
        shape=one(tensor.shape, shape),
        extents=one(tensor.extents, tensor.extents[d] * inner),
        offsets=one(tensor.offsets, tensor.offsets[d] * inner + tensor.offsets[d + 1]),
        padded=one(tensor.padded, shape),
    )


def joins(tensor: Tensor, d: int) -> bool:
    """True if dimensions d and d + 1 can be merged: their elements have the strides of a single
    dimension, and the size of this dimension fits into a task's coordinates.
    """
    outer, inner = tensor.shape[d : d + 2]
    return outer == 1 or (tensor.extents[d + 1] == inner and outer * inner <= MAX_COORDINATE)


def merge(tensors: Sequence[Tensor], kept: int = 0) -> list[Tensor]:
    """The tensors with neighbouring dimensions merged, as far as the layout of all tensors allows.
    All tensors are broadcast to the shape of the last one. kept: the number of last dimensions that
    are not merged.
    """
    rank = len(tensors[-1].shape)
    parts = [widen(t, rank) for t in tensors]
    for d in range(rank - 2 - kept, -1, -1):
        wanted = parts[-1].shape[d : d + 2]
        matching = all(t.shape[d : d + 2] in (wanted, (1, 1)) for t in parts)
        if matching and all(joins(t, d) for t in parts):
            parts = [join(t, d) for t in parts]
    return parts


def merge_transposed(
    source: Tensor, target: Tensor, perm: Sequence[int]
) -> tuple[Tensor, Tensor, list[int]]:
    """A transposition with fewer dimensions. Dimensions that are neighbours on both sides are
    merged, and dimensions of size 1 are removed. Returns source, target and permutation.
    """
    order = list(perm)
    for d in reversed(range(len(order))):
        p = order[d]
        if len(order) > 1 and target.padded[d] == target.extents[d] == source.extents[p] == 1:
            source, target = without(source, p), without(target, d)
            del order[d]
            order = [q - (q > p) for q in order]
    d = len(order) - 2
    while d >= 0:
        p = order[d]
        if order[d + 1] == p + 1 and joins(source, p) and joins(target, d):
            source, target = join(source, p), join(target, d)
            del order[d + 1]
            order = [q - (q > p) for q in order]
            d = len(order) - 1
        d -= 1
    return source, target, order
