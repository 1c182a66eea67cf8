"""Remainders and floored quotients are NumPy's: those of floats are exact, and those of integers
divided by 0 are 0.
"""

from __future__ import annotations

import numpy as np
import pytest

import ark
from ark.ir.dtype import DataType, fp32, int32, int64
from ark.ops.elementwise import binary

SPECIAL = (np.nan, np.inf, -np.inf, 0.0, 1.0, -0.5, 3.0, 0.1, 1e30, -3.4e38, 1e-38, -1e-45, 2.0**20)


def _pairs() -> tuple[np.ndarray, np.ndarray]:
    """Special numbers, ratios of every size, multiples, and numbers beside halves."""
    random, n = np.random.default_rng(1), 1 << 12
    special = np.meshgrid(SPECIAL, SPECIAL)
    a, b = random.uniform(-1, 1, (2, n))
    far = a * 10.0 ** random.uniform(-12, 12, n)
    b32 = b.astype(np.float32)
    multiples = np.float32(random.integers(-50, 50, n)) * b32
    halves = np.nextafter(b32 / 2, np.float32(random.choice([-9, 9], n)))
    left = [special[0].ravel(), a, far, multiples, halves]
    right = [special[1].ravel(), b, b, b, b]
    return np.concatenate(left).astype(np.float32), np.concatenate(right).astype(np.float32)


def _computed(left: np.ndarray, right: np.ndarray, dtype: DataType) -> dict[str, np.ndarray]:
    """Returns ark's remainders and floored quotients of two vectors, by NumPy's names."""
    x, y = ark.tensor([len(left)], dtype), ark.tensor([len(left)], dtype)
    outputs = {name: binary(name, x, y, None, "") for name in ("fmod", "mod", "floor_divide")}
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(left)
        y.from_numpy(right)
        runtime.run()
        return {name: out.to_numpy() for name, out in outputs.items()}


def test_remainders_are_exact(backend: str) -> None:
    ark.init(backend=backend)
    left, right = _pairs()
    results = _computed(left, right, fp32)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(results["fmod"], np.fmod(left, right))
        np.testing.assert_array_equal(results["mod"], np.mod(left, right))
        want = np.floor_divide(left.astype(np.float64), right.astype(np.float64))
    exact = np.abs(want) < 1 << 22
    np.testing.assert_array_equal(results["floor_divide"][exact], want[exact])


@pytest.mark.parametrize("dtype", [int32, int64], ids=str)
def test_integers_divided_by_zero_are_zero(backend: str, dtype: DataType) -> None:
    ark.init(backend=backend)
    least = np.iinfo(dtype.numpy).min
    left = np.array([7, -7, 0, least, least, 5], dtype.numpy)
    right = np.array([0, 0, 0, 0, 2, -3], dtype.numpy)
    with np.errstate(all="ignore"):
        for name, result in _computed(left, right, dtype).items():
            np.testing.assert_array_equal(result, getattr(np, name)(left, right))
