"""Softmax and norms of rows that are longer than what the registers of a block hold, and too short
to be divided among processors, compared with NumPy.
"""

from __future__ import annotations

import numpy as np

import ark
from tests.opcheck import Case, check

# Rows of whole vectors: of which registers hold all, then a part. The last cannot be read in
# vectors.
LENGTHS = ((12000, ark.bf16), (40008, ark.bf16), (20004, ark.fp32), (12345, ark.fp16))


def log_softmax(x: np.ndarray) -> np.ndarray:
    less = x - x.max(-1, keepdims=True)
    return np.asarray(less - np.log(np.exp(less).sum(-1, keepdims=True)))


def layernorm(x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5))


def rmsnorm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w)


def test_long_rows_equal_numpy(backend: str) -> None:
    ark.init(backend=backend)
    rng = np.random.default_rng(5)
    cases = []
    for columns, dtype in LENGTHS:
        x = rng.standard_normal((3, columns)) + 2.0
        weight = rng.standard_normal(columns)
        cases += [
            Case(f"log_softmax {columns}", [(x, dtype)], ark.log_softmax, log_softmax),
            Case(f"norm {columns}", [(x, dtype)], lambda t: ark.layernorm(t, 1e-5), layernorm),
            Case(
                f"weighted {columns}",
                [(x, dtype), (weight, dtype)],
                lambda t, w: ark.rmsnorm(t, w, 1e-5),
                rmsnorm,
            ),
        ]
    check(cases)
