"""Tensors and buffers of a graph. A tensor is a box (a rectangular part) of a row-major buffer, as
in ARK. `extents` are the buffer's sizes per dimension (ARK calls them strides). The tensor's
element [i, ...] is the buffer's element [offsets[0] + i, ...].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ark.errors import InvalidUsageError, ModelError
from ark.ir.dtype import DataType

MAX_DIMS = 8
# The largest size of a dimension. Tasks count indices in 32 bits, up to the end of the last tile,
# which may exceed the dimension.
MAX_DIM_ELEMENTS = (7 << 28) - 1


def whole(subject: str, value: object) -> int:
    """The value as an int. Raises InvalidUsageError, which begins with `subject`, if it is not a
    whole number; nothing is rounded.
    """
    try:
        number = int(value)  # type: ignore[call-overload]
        if number == value:
            return int(number)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidUsageError(f"{subject}: {value!r:.60} is not a whole number")


def row_major(extents: Sequence[int]) -> tuple[int, ...]:
    """The stride of each dimension, in elements, of a row-major array with these sizes."""
    strides = [1] * len(extents)
    for d in range(len(extents) - 2, -1, -1):
        strides[d] = strides[d + 1] * extents[d + 1]
    return tuple(strides)


@dataclass(frozen=True)
class Buffer:
    """The memory of tensors. arena: as in ark.plan.types. rank: its owner; -1 for this rank."""

    id: int
    arena: str
    nbytes: int
    rank: int = -1
    name: str = ""
    address: int = 0


@dataclass(frozen=True)
class Tensor:
    """A value of the graph: a box of elements in a buffer. Each write into a buffer makes a new
    tensor on the buffer.
    """

    id: int
    dtype: DataType
    shape: tuple[int, ...]
    extents: tuple[int, ...]
    offsets: tuple[int, ...]
    padded: tuple[int, ...]
    buffer: Buffer
    name: str = ""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(self.elements)

    @property
    def dense(self) -> bool:
        """True if the elements are consecutive in memory."""
        return all(
            e == s or math.prod(self.shape[:d]) == 1
            for d, (e, s) in enumerate(zip(self.extents, self.shape, strict=True))
        )

    @property
    def strides(self) -> tuple[int, ...]:
        """Element strides per dimension."""
        return row_major(self.extents)


def overlap(a: Tensor, b: Tensor) -> bool:
    """True if two tensors may have an element in common."""
    if a.buffer.id != b.buffer.id:
        return False
    if a.extents != b.extents:
        return True
    boxes = zip(a.offsets, a.shape, b.offsets, b.shape, strict=True)
    return all(x < y + m and y < x + n for x, n, y, m in boxes)


def dense_view(
    tensor: Tensor, shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The extents and offsets of a dense tensor that is viewed in another shape; None if such a
    view is not possible. The sizes of the new shape after its first dimension are multiplied; the
    buffer's number of elements and the tensor's first element must be multiples of this product.
    If only the rows (the last dimension) have gaps after them, a view with the same rows is
    possible.
    """
    if math.prod(shape) != tensor.elements:
        return None
    if not tensor.dense:
        return _rows_view(tensor, shape)
    if tensor.dtype.packed and (not shape or shape[-1] % tensor.dtype.per_item):
        return None
    start = sum(o * s for o, s in zip(tensor.offsets, tensor.strides, strict=True))
    total = math.prod(tensor.extents)
    inner = math.prod(shape[1:])
    if not shape or start % inner or total % inner:
        return None
    return (total // inner, *shape[1:]), (start // inner, *([0] * (len(shape) - 1)))


def _rows_view(
    tensor: Tensor, shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The result of `dense_view` for a tensor whose rows have gaps after them."""
    if len(tensor.shape) < 2 or len(shape) < 2 or shape[-1] != tensor.shape[-1]:
        return None
    rows = replace(
        tensor,
        shape=tensor.shape[:-1],
        extents=tensor.extents[:-1],
        offsets=tensor.offsets[:-1],
        padded=tensor.padded[:-1],
    )
    view = dense_view(rows, shape[:-1]) if rows.dense and not tensor.dtype.packed else None
    if view is None:
        return None
    return (*view[0], tensor.extents[-1]), (*view[1], tensor.offsets[-1])


def check_layout(
    shape: tuple[int, ...],
    extents: tuple[int, ...],
    offsets: tuple[int, ...],
    padded: tuple[int, ...],
) -> None:
    """Raises ModelError if ARK's rules do not allow this combination of shape, extents and
    offsets.
    """
    if len(shape) > MAX_DIMS:
        raise ModelError(
            f"a tensor of shape {list(shape)} has {len(shape)} dimensions; at most {MAX_DIMS} are "
            "supported: reshape it"
        )
    for name, dims in (("strides", extents), ("offsets", offsets), ("padded_shape", padded)):
        if len(dims) != len(shape):
            raise ModelError(
                f"{name} {list(dims)} has {len(dims)} dimensions, but the shape {list(shape)} has "
                f"{len(shape)}; give one number per dimension"
            )
    for d, size in enumerate(shape):
        if size <= 0:
            raise ModelError(f"the shape {list(shape)} has a dimension of {size}; all must be > 0")
        if offsets[d] < 0 or padded[d] < size or offsets[d] + padded[d] > extents[d]:
            raise ModelError(
                f"dimension {d} does not fit its buffer: shape {size}, padded shape {padded[d]}, "
                f"offset {offsets[d]}, strides {extents[d]}; it must hold that shape <= padded "
                "shape and offset + padded shape <= strides"
            )
