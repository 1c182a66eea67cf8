"""Cases of scalar.hip: scalar loads of memory that changes, compared with the same sums in
NumPy.
"""

from __future__ import annotations

import numpy as np

from kernel_cases import Out, Target, Work, kernel

FILE = "scalar.hip"


def _pages(blocks: int, threads: int, rounds: int) -> Work:
    expected = np.full((blocks, threads), sum(r * r + 1 for r in range(rounds)), np.uint32)
    expected[0] = 0
    counters = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    args = (Out((16,), np.uint32), *counters, Out(expected.shape, np.uint32), np.int32(rounds))
    return Work(args, {3: expected})


@kernel(FILE, 4, 64, cooperative=True)
def scalar_page(rng: np.random.Generator, target: Target) -> Work:
    return _pages(4, 64, 7)


@kernel(FILE, 3, 128, cooperative=True)
def scalar_page_leader(rng: np.random.Generator, target: Target) -> Work:
    return _pages(3, 128, 6)


@kernel(FILE, 5, 64)
def scalar_own(rng: np.random.Generator, target: Target) -> Work:
    expected = np.repeat(np.arange(5) * 400 + 30, 64).reshape(5, 64).astype(np.uint32)
    return Work((Out((5, 16), np.uint32), Out(expected.shape, np.uint32)), {1: expected})
