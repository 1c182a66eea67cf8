"""Quantised matrices in NumPy. Converts between the bytes of rows as they are in device memory
(ark.ir.dtype.RowType), codes and scales, and floating-point values. Called by ark.models, which
writes such matrices, and by reference implementations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ark.ir.dtype import CODE_STEP, RowType

Array = npt.NDArray[Any]
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight 4-bit codes, lowest bits first


def row_bytes(dtype: RowType, codes: Array, scales: Array, zeros: Array | None = None) -> Array:
    """The bytes of quantised rows, (n, bytes). codes: (n, columns). scales, zeros: (n, groups)."""
    rows = np.zeros((len(codes), dtype.itemsize), np.uint8)
    places = (dtype.scales_at, dtype.zeros_at)
    bits: Array = np.ascontiguousarray(codes.astype(dtype.codes.numpy, copy=False)).view(np.uint8)
    if dtype.codes.packed:
        halves = bits.reshape(len(codes), -1, CODE_STEP)[..., list(ORDER)] & 15
        bits = (halves[..., 0::2] | halves[..., 1::2] << 4).reshape(len(codes), -1)
    rows[:, : dtype.scales_at] = bits
    for begin, values in zip(places, (scales, zeros), strict=True):
        if values is not None:
            stored = np.ascontiguousarray(values.astype(dtype.scales.numpy, copy=False))
            own = stored.view(np.uint8).reshape(len(codes), -1)
            rows[:, begin : begin + own.shape[1]] = own
    return rows


def row_parts(dtype: RowType, rows: Array) -> tuple[Array, Array, Array | None]:
    """The inverse of `row_bytes`: the codes, scales and zero points of quantised rows, given as
    bytes. The zero points are None if the type has none.
    """
    bits = np.ascontiguousarray(rows[:, : dtype.scales_at])
    if dtype.codes.packed:
        halves = np.stack([bits & 15, bits >> 4], -1).reshape(len(rows), -1, CODE_STEP)
        bits = np.empty_like(halves)
        bits[..., list(ORDER)] = halves
    codes = bits.reshape(len(rows), -1).view(dtype.codes.numpy)

    def floats(begin: int) -> Array:
        end = begin + dtype.scales.nbytes(dtype.groups)
        return np.ascontiguousarray(rows[:, begin:end]).view(dtype.scales.numpy)

    zeros = floats(dtype.zeros_at) if dtype.zeros else None
    return codes, floats(dtype.scales_at), zeros


def row_values(dtype: RowType, rows: Array) -> npt.NDArray[np.float32]:
    """The dequantised values of rows, given as bytes: fp32, (n, columns)."""
    codes, scales, zeros = row_parts(dtype, rows)
    values = codes.astype(np.float32)
    if zeros is not None:
        values -= zeros.astype(np.float32).repeat(dtype.group, 1)
    values *= scales.astype(np.float32).repeat(dtype.group, 1)
    return values
