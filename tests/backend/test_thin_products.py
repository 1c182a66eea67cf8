"""Products where one operand has few rows or columns, and many products of small matrices, on every
backend, compared with NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import ark
from tests.opcheck import Case, check


def product(
    batch: tuple[int, ...],
    m: int,
    n: int,
    k: int,
    transposes: tuple[bool, bool] = (False, False),
    dtype: Any = ark.fp32,
    then: bool = False,
) -> Case:
    ta, tb = transposes
    rng = np.random.default_rng(m * n + k)
    a = rng.uniform(-1, 1, (*batch, *((k, m) if ta else (m, k))))
    b = rng.uniform(-1, 1, (*batch, *((n, k) if tb else (k, n))))
    if dtype is ark.int8:
        a, b = (np.round(100 * v) for v in (a, b))

    def build(x: Any, y: Any) -> Any:
        multiplied = ark.matmul(x, y, transpose_input=ta, transpose_other=tb)
        return ark.relu(multiplied) if then else multiplied

    def expected(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        left = np.swapaxes(x, -1, -2) if ta else x
        multiplied = left @ (np.swapaxes(y, -1, -2) if tb else y)
        return np.maximum(multiplied, 0) if then else multiplied

    name = f"{batch} {m} {n} {k} {transposes} {dtype} {then}"
    return Case(
        name, [(a, dtype), (b, dtype)], build, expected, 1e-4 if dtype is ark.fp32 else None
    )


def test_k_side_by_side(backend: str) -> None:
    """Thin products whose operands are contiguous along k: vectors, and few rows or columns. Row
    lengths are not multiples of a vector, there are fewer rows than warps, or there is a batch.
    """
    turned = (False, True)
    check(
        [
            product((), 300, 1, 512),
            product((), 1, 300, 512, turned),
            product((), 3, 37, 1026, turned, then=True),
            product((), 45, 10, 333, turned),
            product((), 45, 16, 256, turned, ark.bf16),
            product((), 8, 129, 264, turned, ark.fp16),
            product((3,), 65, 1, 200),
            product((5,), 70, 1, 26, (False, False), ark.bf16, then=True),
            product((3,), 6, 1, 144, (False, False), ark.bf16),
            product((2, 2), 2, 40, 128, turned, ark.bf16, then=True),
            product((), 33, 5, 96, turned, ark.int8),
        ]
    )


def test_rows_side_by_side(backend: str) -> None:
    """Thin products whose long operand is contiguous along its rows, so that threads are spread
    over it. Sizes are not multiples of a vector.
    """
    check(
        [
            product((), 1, 300, 512),
            product((), 1, 301, 333),
            product((), 5, 96, 130, then=True),
            product((), 16, 101, 200, then=True),
            product((2,), 13, 64, 100),
            product((), 200, 1, 300, (True, False)),
            product((), 72, 3, 100, (True, False), ark.bf16),
            product((), 8, 64, 200, (False, False), ark.fp16),
            product((3,), 2, 42, 77),
            product((), 1, 64, 128, (False, False), ark.int8),
        ]
    )


def test_k_in_parts(backend: str) -> None:
    """Thin products whose k is split, because the long operand has too few tiles for all
    processors.
    """
    check(
        [
            product((), 3, 1, 1 << 17, then=True),
            product((), 1, 64, 1 << 13),
            product((), 2, 20, 1 << 14, (False, True), ark.bf16),
        ]
    )


def test_many_small_matrices(backend: str) -> None:
    """Many products of small matrices, one per warp: with sizes that are not multiples of a vector,
    k that is not a multiple of four, and broadcast matrices.
    """
    many = 700
    turned = (False, True)
    check(
        [
            product((many,), 16, 16, 16),
            product((many,), 16, 16, 16, turned, ark.bf16, then=True),
            product((many // 2, 2), 5, 7, 9, (True, True)),
            product((many,), 4, 4, 4, (False, False), ark.fp16),
            product((many,), 3, 20, 33, (True, False)),
        ]
    )
