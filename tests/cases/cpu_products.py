"""Matrix products on a CPU as cases, which tests also run in a process with fewer instructions."""

from __future__ import annotations

from typing import Any

import numpy as np

import ark
from tests.opcheck import Case


def product(m: int, n: int, k: int, transposes: str, dtype: Any, then: bool = False) -> Case:
    """Returns a product of random matrices as a case. transposes: a letter for each matrix, "n" or
    "t".
    """
    ta, tb = (letter == "t" for letter in transposes)
    rng = np.random.default_rng(m * n + k)
    a, b = (rng.uniform(-1, 1, s) for s in ((k, m) if ta else (m, k), (n, k) if tb else (k, n)))
    if dtype is ark.int8:
        a, b = (np.round(128 * v).clip(-128, 127) for v in (a, b))

    def build(x: Any, y: Any) -> Any:
        multiplied = ark.matmul(x, y, transpose_input=ta, transpose_other=tb)
        return ark.relu(multiplied) if then else multiplied

    def expected(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        multiplied = (x.T if ta else x) @ (y.T if tb else y)
        return np.maximum(multiplied, 0) if then else multiplied

    name = f"{m} {n} {k} {transposes} {dtype} {then}"
    tolerance = {ark.fp32: 1e-4, ark.int8: 0.0}.get(dtype)
    return Case(name, [(a, dtype), (b, dtype)], build, expected, tolerance)
