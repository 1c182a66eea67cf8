"""Cases of movement.hip: transposes, LDS in all widths, buffers with bounds, compared with
NumPy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernel_cases import CDNA, Out, Target, Work, kernel

FILE = "movement.hip"
ROWS, COLUMNS = 40, 23


def _transpose(dtype: type) -> Callable[[np.random.Generator, Target], Work]:
    def make(rng: np.random.Generator, target: Target) -> Work:
        x = rng.integers(0, 200, (ROWS, COLUMNS)).astype(dtype)
        sizes = np.int32(ROWS), np.int32(COLUMNS)
        return Work((x, Out((COLUMNS, ROWS), dtype), *sizes), {1: x.T})

    return make


for _name, _dtype in {
    "transpose_f32": np.float32,
    "transpose_u16": np.uint16,
    "transpose_u8": np.uint8,
    "transpose_f64": np.float64,
}.items():
    _make = _transpose(_dtype)
    _make.__name__ = _name
    kernel(FILE, (2, 3), (16, 16))(_make)


@kernel(FILE, 2, 256)
def mirror_vector4(rng: np.random.Generator, target: Target) -> Work:
    x = rng.standard_normal((2, 256, 4)).astype(np.float32)
    return Work((x, Out(x.shape, np.float32)), {1: x[:, ::-1]})


@kernel(FILE, 3, 192, dynamic_lds=192 * 4)
def reverse_dynamic_lds(rng: np.random.Generator, target: Target) -> Work:
    x = rng.integers(0, 1000, (3, 192)).astype(np.int32)
    return Work((x, Out(x.shape, np.int32), np.int32(192)), {1: x[:, ::-1]})


@kernel(FILE, 3, 256)
def gather_scatter(rng: np.random.Generator, target: Target) -> Work:
    index = rng.permutation(600).astype(np.int32)
    x = rng.standard_normal(600).astype(np.float32)
    expected = np.empty_like(x)
    expected[index] = x[index[::-1]]
    return Work((index, x, Out((600,), np.float32), np.int32(600)), {2: expected})


@kernel(FILE, 2, 64)
def buffer_bounds(rng: np.random.Generator, target: Target) -> Work:
    """Buffer instructions with bounds: 128 lanes on 100 elements. Each lane loads the element after
    its own, and stores beyond the end are dropped.
    """
    x, y = rng.integers(0, 1000, 100).astype(np.int32), np.full(100, -7, np.int32)
    expected = np.append(x[1:], 0) + 1
    return Work((x, y, np.int32(100)), {1: expected.astype(np.int32)})


@kernel(FILE, 2, 256, archs=CDNA)
def load_to_lds(rng: np.random.Generator, target: Target) -> Work:
    x = rng.integers(0, 1000, (2, 256)).astype(np.int32)
    return Work((x, Out(x.shape, np.int32)), {1: x[:, ::-1]})


@kernel(FILE, 1, 64)
def module_globals(rng: np.random.Generator, target: Target) -> Work:
    expected = (np.arange(64) % 8) ** 2 + 5
    return Work((Out((64,), np.int32),), {0: expected.astype(np.int32)})


@kernel(FILE, 3, 256)
def stencil_halo(rng: np.random.Generator, target: Target) -> Work:
    x = (rng.integers(-64, 64, 700) / 8).astype(np.float32)
    wide = np.concatenate([[0], x, [0]])
    expected = (0.25 * wide[:-2] + 0.5 * wide[1:-1] + 0.25 * wide[2:]).astype(np.float32)
    return Work((x, Out((700,), np.float32), np.int32(700)), {1: expected})
