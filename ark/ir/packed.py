"""Elements of 4 bits between memory, two to a byte, and NumPy, a byte each (ml_dtypes).

Called by whoever copies tensors between host and device, and by ark.api.state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ark.ir.dtype import DataType


def to_memory(values: np.ndarray, dtype: DataType) -> np.ndarray:
    """An array of the type's elements as bytes: rows begin at whole bytes, low half first."""
    if not dtype.packed:
        return np.ascontiguousarray(values, dtype.numpy)
    halves = np.ascontiguousarray(values, dtype.numpy).view(np.uint8) & 15
    if halves.shape[-1] % 2:
        halves = np.pad(halves, [(0, 0)] * (halves.ndim - 1) + [(0, 1)])
    return np.ascontiguousarray(halves[..., 0::2] | halves[..., 1::2] << 4)


def from_memory(data: np.ndarray, shape: Sequence[int], dtype: DataType) -> np.ndarray:
    """The elements of dense rows of bytes, as `to_memory` makes them."""
    if not dtype.packed:
        return data.view(dtype.numpy).reshape(shape)
    pairs = data.view(np.uint8).reshape(*shape[:-1], -1)
    halves = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*shape[:-1], -1)
    return np.ascontiguousarray(halves[..., : shape[-1]]).view(dtype.numpy)
