"""Cases of gemm.hip: matrix products on the vector units, compared with NumPy in double."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kernel_cases import Out, Target, Work, kernel

FILE = "gemm.hip"


def _matrices(rng: np.random.Generator, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    return a.astype(np.float32), b.astype(np.float32)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) @ b.astype(np.float64)


@kernel(FILE, (3, 3), (16, 8))
def gemm_naive(rng: np.random.Generator, target: Target) -> Work:
    m, n, k = 21, 37, 19
    a, b = _matrices(rng, m, n, k)
    sizes = np.int32(m), np.int32(n), np.int32(k)
    expected = {2: _product(a, b)}
    return Work((a, b, Out((m, n), np.float32), *sizes), expected, rtol=1e-5, atol=1e-5)


@kernel(FILE, (3, 2), (16, 16))
def gemm_tiled(rng: np.random.Generator, target: Target) -> Work:
    m, n, k = 27, 37, 41
    a, b = _matrices(rng, m, n, k)
    sizes = np.int32(m), np.int32(n), np.int32(k)
    expected = {2: _product(a, b)}
    return Work((a, b, Out((m, n), np.float32), *sizes), expected, rtol=1e-5, atol=1e-5)


@kernel(FILE, (2, 2), 256)
def gemm_double_buffered(rng: np.random.Generator, target: Target) -> Work:
    m, n, k = 64, 64, 40
    a, b = _matrices(rng, m, n, k)
    sizes = np.int32(n), np.int32(k)
    expected = {2: _product(a, b)}
    return Work((a, b, Out((m, n), np.float32), *sizes), expected, rtol=1e-5, atol=1e-5)


def _one_wave(work: Work, target: Target) -> Work:
    return Work(work.args, work.expected, work.rtol, work.atol, block=target.wave)


@kernel(FILE, 5, 64)
def gemv_bf16(rng: np.random.Generator, target: Target) -> Work:
    a = rng.standard_normal((5, 200)).astype(ml_dtypes.bfloat16)
    x = rng.standard_normal(200).astype(ml_dtypes.bfloat16)
    args = (a, x, Out((5,), np.float32), np.int32(200))
    return _one_wave(Work(args, {2: _product(a, x)}, rtol=1e-5, atol=1e-5), target)


@kernel(FILE, 5, 64)
def gemv_half_dot(rng: np.random.Generator, target: Target) -> Work:
    a = rng.standard_normal((5, 300)).astype(np.float16)
    x = rng.standard_normal(300).astype(np.float16)
    args = (a, x, Out((5,), np.float32), np.int32(150))
    return _one_wave(Work(args, {2: _product(a, x)}, rtol=1e-5, atol=1e-4), target)


@kernel(FILE, 5, 64)
def gemv_int8_dot(rng: np.random.Generator, target: Target) -> Work:
    a, x = rng.integers(-128, 128, (5, 400)), rng.integers(-128, 128, 400)
    args = (a.astype(np.int8), x.astype(np.int8), Out((5,), np.int32), np.int32(100))
    return _one_wave(Work(args, {2: (a @ x).astype(np.int32)}), target)
