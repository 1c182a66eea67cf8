"""Cases of reduce.hip: reductions and lane exchanges, compared with NumPy."""

from __future__ import annotations

import numpy as np

from kernel_cases import Out, Target, Work, kernel

FILE = "reduce.hip"


def _small(rng: np.random.Generator, shape: int | tuple[int, ...]) -> np.ndarray:
    """Floats whose sums are exact in any order: small multiples of 1/8."""
    return (rng.integers(-64, 64, shape) / 8).astype(np.float32)


@kernel(FILE, 4, 256)
def block_sum(rng: np.random.Generator, target: Target) -> Work:
    x = _small(rng, (4, 256))
    return Work((x, Out((4,), np.float32)), {1: x.sum(1)})


@kernel(FILE, 3, 256)
def wave_sum_shuffle(rng: np.random.Generator, target: Target) -> Work:
    x = _small(rng, 768)
    sums = x.reshape(-1, target.wave).sum(1)
    return Work((x, Out(sums.shape, np.float32)), {1: sums})


@kernel(FILE, 3, 256)
def wave_sum_dpp(rng: np.random.Generator, target: Target) -> Work:
    x = rng.integers(-1000, 1000, 768).astype(np.int32)
    sums = x.reshape(-1, target.wave).sum(1).astype(np.int32)
    return Work((x, Out(sums.shape, np.int32)), {1: sums})


@kernel(FILE, 2, 128)
def shift_dpp(rng: np.random.Generator, target: Target) -> Work:
    x = rng.integers(0, 1000, 256).astype(np.int32)
    rows = x.reshape(-1, 16)
    right = np.concatenate([np.full((16, 1), -1), rows[:, :-1]], axis=1)
    left = np.concatenate([rows[:, 2:], np.zeros((16, 2), int)], axis=1)
    halves = rows.reshape(-1, 2, 8)[:, :, ::-1].reshape(-1, 16)
    # Row mask 0xa writes rows 1 and 3 of a wave (row 1 of a wave of 32).
    halves = np.where(np.arange(16)[:, None] % 2 == 1, halves, -1)
    expected = np.stack([right, left, rows[:, ::-1], halves], axis=2).reshape(-1, 4)
    return Work((x, Out((256, 4), np.int32)), {1: expected.astype(np.int32)})


@kernel(FILE, 2, 128)
def swizzle_groups(rng: np.random.Generator, target: Target) -> Work:
    x = rng.integers(0, 1000, 256).astype(np.int32)
    i = np.arange(256)
    return Work((x, Out((256, 2), np.int32)), {1: np.stack([x[i ^ 1], x[i ^ 1]], axis=1)})


@kernel(FILE, 5, 128)
def grid_sum_atomic(rng: np.random.Generator, target: Target) -> Work:
    x = rng.integers(-(2**31), 2**31, 600).astype(np.int32)
    total = np.array([x.sum(dtype=np.int64)]).astype(np.int32)
    return Work((x, np.zeros(1, np.int32), np.int32(600)), {1: total})


@kernel(FILE, 5, 128)
def extremes_atomic(rng: np.random.Generator, target: Target) -> Work:
    x = rng.integers(-(2**31), 2**31, 600).astype(np.int32)
    start = np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.uint32)
    expected = {1: x.min(keepdims=True), 2: x.max(keepdims=True)}
    expected[3] = x.view(np.uint32).max(keepdims=True)
    return Work((x, *start, np.int32(600)), expected)


@kernel(FILE, 5, 128)
def argmax_packed(rng: np.random.Generator, target: Target) -> Work:
    x = rng.integers(0, 50, 600).astype(np.uint32)
    best = int(x.max()) << 32 | (0xFFFFFFFF - int(x.argmax()))
    return Work((x, np.zeros(1, np.uint64), np.int32(600)), {1: np.array([best], np.uint64)})


@kernel(FILE, 6, 256)
def last_block_sum(rng: np.random.Generator, target: Target) -> Work:
    x = _small(rng, 2500)
    buffers = Out((6,), np.float32), np.zeros(1, np.uint32), Out((1,), np.float32)
    return Work((x, *buffers, np.int32(2500)), {3: x.sum(keepdims=True)})


@kernel(FILE, 3, 256)
def softmax_rows(rng: np.random.Generator, target: Target) -> Work:
    x = rng.standard_normal((3, 300)).astype(np.float32)
    power = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    expected = power / power.sum(1, keepdims=True)
    return Work((x, Out(x.shape, np.float32), np.int32(300)), {1: expected}, rtol=3e-6)


@kernel(FILE, 3, 256)
def rms_norm(rng: np.random.Generator, target: Target) -> Work:
    x = rng.standard_normal((3, 300)).astype(np.float32)
    weight = rng.standard_normal(300).astype(np.float32)
    scale = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5)
    sizes = np.int32(300), np.float32(1e-5)
    out = Out(x.shape, np.float32)
    return Work((x, weight, out, *sizes), {2: x * scale * weight}, rtol=3e-6)


@kernel(FILE, 1, 256)
def dot_f64(rng: np.random.Generator, target: Target) -> Work:
    a, b = rng.standard_normal(1000), rng.standard_normal(1000)
    expected = {2: np.array([a @ b])}
    return Work((a, b, Out((1,), np.float64), np.int32(1000)), expected, rtol=1e-12, atol=1e-12)


@kernel(FILE, 2, 256)
def votes(rng: np.random.Generator, target: Target) -> Work:
    x = rng.integers(-20, 3, 512).astype(np.int32)
    x[: target.wave], x[-target.wave :] = 1, -1
    waves = x.reshape(-1, target.wave) > 0
    ballots = (waves.astype(np.uint64) << np.arange(target.wave, dtype=np.uint64)).sum(1)
    answers = waves.any(1) | waves.all(1) << 1 | waves.sum(1) << 2
    outs = Out(ballots.shape, np.uint64), Out(answers.shape, np.int32)
    return Work((x, *outs), {1: ballots.astype(np.uint64), 2: answers.astype(np.int32)})
