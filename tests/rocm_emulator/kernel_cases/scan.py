"""Cases of scan.hip: prefix sums, compaction and sorting, compared with NumPy."""

from __future__ import annotations

import numpy as np

from kernel_cases import Out, Target, Work, kernel

FILE = "scan.hip"


def _integers(rng: np.random.Generator, blocks: int) -> np.ndarray:
    return rng.integers(-1000, 1000, (blocks, 256)).astype(np.int32)


@kernel(FILE, 3, 256)
def block_scan(rng: np.random.Generator, target: Target) -> Work:
    x = _integers(rng, 3)
    return Work((x, Out(x.shape, np.int32)), {1: x.cumsum(1).astype(np.int32)})


@kernel(FILE, 2, 256)
def wave_scan(rng: np.random.Generator, target: Target) -> Work:
    x = (rng.integers(-64, 64, (512 // target.wave, target.wave)) / 8).astype(np.float32)
    return Work((x, Out(x.shape, np.float32)), {1: x.cumsum(1)})


@kernel(FILE, 6, 256)
def chained_scan(rng: np.random.Generator, target: Target) -> Work:
    x = _integers(rng, 6)
    expected = x.ravel().cumsum().astype(np.int32)
    return Work((x, Out((1536,), np.int32), np.zeros(6, np.uint64)), {1: expected})


@kernel(FILE, 3, 256)
def segmented_scan(rng: np.random.Generator, target: Target) -> Work:
    x, head = _integers(rng, 3), (rng.random((3, 256)) < 0.1).astype(np.int32)
    expected = np.empty_like(x)
    for b in range(3):
        total = 0
        for t in range(256):
            total = int(x[b, t]) if head[b, t] else total + int(x[b, t])
            expected[b, t] = total
    return Work((x, head, Out(x.shape, np.int32)), {2: expected})


@kernel(FILE, 3, 256)
def compact_odd(rng: np.random.Generator, target: Target) -> Work:
    x = _integers(rng, 3)
    expected, counts = np.zeros_like(x), np.zeros(3, np.int32)
    for b in range(3):
        kept = x[b][x[b] % 2 == 1]
        counts[b], expected[b, : kept.size] = kept.size, kept
    return Work((x, np.zeros_like(x), Out((3,), np.int32)), {1: expected, 2: counts})


@kernel(FILE, 3, 256)
def bitonic_sort(rng: np.random.Generator, target: Target) -> Work:
    x = _integers(rng, 3)
    return Work((x, Out(x.shape, np.int32)), {1: np.sort(x, axis=1)})
