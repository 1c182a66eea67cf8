"""Cases of histogram.hip: atomics on global memory and LDS, compared with NumPy."""

from __future__ import annotations

import numpy as np

from kernel_cases import Out, Target, Work, kernel

FILE = "histogram.hip"
ELEMENT_COUNT = 1500


@kernel(FILE, 3, 256)
def histogram_global(rng: np.random.Generator, target: Target) -> Work:
    x = rng.integers(0, 256, ELEMENT_COUNT).astype(np.uint8)
    expected = np.bincount(x, minlength=256).astype(np.uint32)
    return Work((x, np.zeros(256, np.uint32), np.int32(ELEMENT_COUNT)), {1: expected})


@kernel(FILE, 3, 256)
def histogram_lds(rng: np.random.Generator, target: Target) -> Work:
    x = rng.integers(0, 9, ELEMENT_COUNT).astype(np.uint8)
    expected = np.bincount(x, minlength=256).astype(np.uint32)
    return Work((x, np.zeros(256, np.uint32), np.int32(ELEMENT_COUNT)), {1: expected})


@kernel(FILE, 3, 128)
def histogram_float_cas(rng: np.random.Generator, target: Target) -> Work:
    key = rng.integers(0, 32, 384).astype(np.uint8)
    weight = (rng.integers(-64, 64, 384) / 8).astype(np.float32)
    expected = np.zeros(32, np.float32)
    np.add.at(expected, key, weight)
    bins = np.zeros(32, np.float32)
    return Work((key, weight, bins, np.int32(384)), {2: expected})


@kernel(FILE, 3, 256)
def lds_atomics(rng: np.random.Generator, target: Target) -> Work:
    x = rng.integers(-(2**31), 2**31, (3, 256)).astype(np.int32)
    rows = []
    for line in x:
        wide = int(line.view(np.uint32).astype(np.uint64).sum())
        reduced = [np.bitwise_or.reduce(line), np.bitwise_xor.reduce(line)]
        row = [int(line.sum(dtype=np.int64)), line.min(), line.max(), *reduced, wide, wide >> 32]
        rows.append([int(v) % 2**32 for v in row])
    expected = np.array(rows, np.uint32)
    return Work((x, Out((3, 7), np.uint32)), {1: expected})


@kernel(FILE, 4, 128)
def tickets(rng: np.random.Generator, target: Target) -> Work:
    def each_once(owner: np.ndarray) -> bool:
        return bool((np.sort(owner) == np.arange(1, 513)).all())

    drawn = np.array([512], np.uint32)
    return Work((np.zeros(1, np.uint32), Out((512,), np.uint32)), {0: drawn, 1: each_once})


@kernel(FILE, 4, 256)
def radix_digits(rng: np.random.Generator, target: Target) -> Work:
    x = rng.integers(0, 2**32, (4, 256)).astype(np.uint32)
    digits = (x >> np.uint32(8)) & np.uint32(15)
    counts = np.stack([np.bincount(line, minlength=16) for line in digits], axis=1)
    return Work((x, Out((16, 4), np.uint32), np.int32(8)), {1: counts.astype(np.uint32)})
