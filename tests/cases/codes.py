"""Random codes of quantised matrices for tests, as numbers of their type."""

from __future__ import annotations

import numpy as np

from ark.ir.dtype import RowType


def every_code(dtype: RowType, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Returns rows of random codes as numbers. They include -0 and exclude NaN and infinities."""
    codes = dtype.codes
    raw = rng.integers(0, 1 << codes.bits, (rows, dtype.columns), dtype=np.uint8)
    if codes.name == "fp8_e4m3":
        raw[raw & 0x7F == 0x7F] = 0x80
    if codes.name == "fp8_e5m2":
        raw[raw & 0x7F >= 0x7C] = 0x80
    if codes.name in ("int4", "uint4"):
        return (raw.astype(np.int64) ^ 8) - 8 if codes.name == "int4" else raw
    if codes.name == "fp4":
        halves = np.array([0, 1, 2, 3, 4, 6, 8, 12]) / 2
        return np.where(raw & 8, -1.0, 1.0) * halves[raw & 7]
    return raw.view(codes.to_numpy()).astype(np.float64)
