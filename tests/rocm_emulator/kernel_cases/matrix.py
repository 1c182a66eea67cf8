"""Cases of mfma.hip and wmma.hip: the matrix instructions, compared with NumPy in double."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from kernel_cases import CDNA, Out, Target, Work, kernel

FP8_FLAVOURS = {
    "gfx942": (ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz),
    "gfx950": (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
}
Types = Callable[[Target], tuple[Any, Any, Any]]


def _register(
    name: str, source: str, tile: int, k: int, types: Types, archs: tuple[str, ...], wave: int
) -> None:
    """Registers a case for one tile shape and type: C [2 tiles][2 tiles] = A B with `k` columns of
    A.
    """

    def make(rng: np.random.Generator, target: Target) -> Work:
        left, right, result = types(target)
        n = 2 * tile
        if result is np.int32:
            a, b = rng.integers(-128, 128, (n, k)), rng.integers(-128, 128, (k, n))
        else:
            a, b = rng.standard_normal((n, k)), rng.standard_normal((k, n))
        a, b = a.astype(left), b.astype(right)
        x, y = a.astype(np.float64), b.astype(np.float64)
        if target.arch == "gfx90a" and left is np.float16:  # takes denormals as zeros
            x, y = (np.where(np.abs(v) < 2.0**-14, 0.0, v) for v in (x, y))
        exact = x @ y
        tight = 1e-12 if result is np.float64 else 2e-5
        rtol, atol = (0.0, 0.0) if result is np.int32 else (tight, tight)
        args = (a, b, Out((n, n), result), np.int32(n), np.int32(k))
        return Work(args, {2: exact.astype(result)}, rtol, atol)

    make.__name__ = name
    kernel(source, (2, 2), wave, archs=archs)(make)


def _same(left: Any, result: Any) -> Types:
    return lambda target: (left, left, result)


def _fp8(second: int) -> Types:
    return lambda target: (
        FP8_FLAVOURS[target.arch][0],
        FP8_FLAVOURS[target.arch][second],
        np.float32,
    )


_FP8_ARCHS = ("gfx942", "gfx950")
for _name, _tile, _k, _types, _archs in (
    ("mfma_f32_32x32", 32, 14, _same(np.float32, np.float32), CDNA),
    ("mfma_f32_16x16", 16, 20, _same(np.float32, np.float32), CDNA),
    ("mfma_half_32x32", 32, 24, _same(np.float16, np.float32), CDNA),
    ("mfma_half_16x16", 16, 48, _same(np.float16, np.float32), CDNA),
    ("mfma_bf16_32x32", 32, 24, _same(ml_dtypes.bfloat16, np.float32), CDNA),
    ("mfma_bf16_16x16", 16, 48, _same(ml_dtypes.bfloat16, np.float32), CDNA),
    ("mfma_f64_16x16", 16, 20, _same(np.float64, np.float64), CDNA),
    ("mfma_int8_16x16", 16, 64, _same(np.int8, np.int32), CDNA),
    ("mfma_fp8_16x16", 16, 64, _fp8(0), _FP8_ARCHS),
    ("mfma_fp8_32x32", 32, 48, _fp8(1), _FP8_ARCHS),
    ("mfma_half_16x16x32", 16, 96, _same(np.float16, np.float32), ("gfx950",)),
):
    _register(_name, "mfma.hip", _tile, _k, _types, _archs, 64)

for _name, _types in (
    ("wmma_half", _same(np.float16, np.float32)),
    ("wmma_bf16", _same(ml_dtypes.bfloat16, np.float32)),
    ("wmma_int8", _same(np.int8, np.int32)),
):
    _register(_name, "wmma.hip", 16, 48, _types, ("gfx1100",), 32)


@kernel("mfma.hip", 5, 64, archs=_FP8_ARCHS)
def fp8_round_trip(rng: np.random.Generator, target: Target) -> Work:
    x = (rng.standard_normal((300, 2)) * 4).astype(np.float32)
    narrow = [x.astype(flavour) for flavour in FP8_FLAVOURS[target.arch]]
    packed = np.concatenate([t.view(np.uint8) for t in narrow], axis=1).view(np.uint32).ravel()
    back = np.concatenate([t.astype(np.float32) for t in narrow], axis=1)
    outs = Out((300,), np.uint32), Out((300, 4), np.float32)
    return Work((x, *outs, np.int32(300)), {1: packed, 2: back})
