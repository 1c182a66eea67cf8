"""Converts 4-bit elements between memory (two to a byte) and NumPy (one to a byte, as in
ml_dtypes). Rows of a RowType are bytes in both.

Called where tensors are copied between host and device, and by ark.runtime.api.state.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from ark.errors import InvalidUsageError
from ark.ir.dtype import INTEGERS, DataType, RowType, int4, uint4


def to_memory(values: np.ndarray, dtype: DataType) -> np.ndarray:
    """The elements of an array as bytes in memory. Each row begins at a whole byte. Of two elements
    that share a byte, the first is in the low half.
    """
    if not dtype.packed or isinstance(dtype, RowType):
        return np.ascontiguousarray(values, dtype.numpy)
    halves = np.ascontiguousarray(values, dtype.numpy).view(np.uint8) & 15
    if halves.shape[-1] % 2:
        halves = np.pad(halves, [(0, 0)] * (halves.ndim - 1) + [(0, 1)])
    return np.ascontiguousarray(halves[..., 0::2] | halves[..., 1::2] << 4)


def alike(shape: Sequence[int], other: Sequence[int]) -> bool:
    """True if two shapes are equal except for dimensions of size 1."""
    return [n for n in shape if n != 1] == [n for n in other if n != 1]


def cast(values: np.ndarray, dtype: DataType, subject: str) -> np.ndarray:
    """The values in the type, as NumPy casts them. For an integer type, raises InvalidUsageError
    for fractions and for integers that are out of range. subject: the beginning of the error's
    message.
    """
    kind = np.dtype(dtype.numpy)
    integer = dtype in INTEGERS or dtype in (int4, uint4)
    if values.dtype == kind or not integer or not values.size:
        return values.astype(kind, copy=False)
    limits = ml_dtypes.iinfo(kind)
    whole = values.dtype.kind in "biu" or bool((np.trunc(values) == values).all())
    if not whole or values.min() < limits.min or values.max() > limits.max:
        raise InvalidUsageError(
            f"{subject} is {dtype.name}, which holds whole numbers from {limits.min} to "
            f"{limits.max}; the array of {values.dtype} has values from {values.min()} to "
            f"{values.max()}{'' if whole else ' with fractions'}: cast the array"
        )
    return values.astype(kind)


def from_memory(data: np.ndarray, shape: Sequence[int], dtype: DataType) -> np.ndarray:
    """The inverse of `to_memory`: the elements of dense rows, from their bytes in memory."""
    if not dtype.packed or isinstance(dtype, RowType):
        whole: np.ndarray = data.view(dtype.numpy)
        return whole.reshape(dtype.host_shape(shape))
    pairs = data.view(np.uint8).reshape(*shape[:-1], -1)
    halves = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*shape[:-1], -1)
    return np.ascontiguousarray(halves[..., : shape[-1]]).view(dtype.numpy)
