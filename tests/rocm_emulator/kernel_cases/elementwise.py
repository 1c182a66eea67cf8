"""Cases of elementwise.hip: arithmetic of one thread on one element, compared with NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kernel_cases import Out, Target, Work, kernel

FILE = "elementwise.hip"
ELEMENT_COUNT = 600
GRID, BLOCK = 3, 256


def _floats(rng: np.random.Generator, n: int = ELEMENT_COUNT, scale: float = 3.0) -> np.ndarray:
    return (rng.standard_normal(n) * scale).astype(np.float32)


@kernel(FILE, GRID, BLOCK)
def saxpy(rng: np.random.Generator, target: Target) -> Work:
    a, x, y = np.float32(rng.standard_normal()), _floats(rng), _floats(rng)
    exact = np.float64(a) * x + y  # the product of two floats is exact in double
    return Work((a, x, y, np.int32(ELEMENT_COUNT)), {2: exact.astype(np.float32)}, rtol=2e-7)


@kernel(FILE, GRID, BLOCK)
def axpy_half2(rng: np.random.Generator, target: Target) -> Work:
    a = np.float16(rng.standard_normal())
    x, y = (rng.standard_normal((ELEMENT_COUNT, 2)).astype(np.float16) for _ in range(2))
    exact = np.float64(a) * x.astype(np.float64) + y.astype(np.float64)
    return Work((a, x, y, np.int32(ELEMENT_COUNT)), {2: exact.astype(np.float16)})


@kernel(FILE, GRID, BLOCK)
def scale_bf16(rng: np.random.Generator, target: Target) -> Work:
    a, x = np.float32(1.7), _floats(rng).astype(ml_dtypes.bfloat16)
    expected = (a * x.astype(np.float32)).astype(ml_dtypes.bfloat16)
    return Work(
        (a, x, Out((ELEMENT_COUNT,), ml_dtypes.bfloat16), np.int32(ELEMENT_COUNT)), {2: expected}
    )


@kernel(FILE, GRID, BLOCK)
def integers_32(rng: np.random.Generator, target: Target) -> Work:
    a, b = (rng.integers(-(2**31), 2**31, ELEMENT_COUNT).astype(np.int32) for _ in range(2))
    b[::7] = rng.integers(-50, 50, b[::7].size)
    a[5], b[5] = 0, 0
    x, y = a.astype(np.int64), b.astype(np.int64)
    u, v = a.view(np.uint32).astype(np.uint64), b.view(np.uint32).astype(np.uint64)
    safe_y, safe_v = np.where(y == 0, 1, y), np.where(v == 0, 1, v)
    quotient = np.where(y == 0, 0, (np.abs(x) // np.abs(safe_y)) * np.sign(x) * np.sign(y))
    bits = np.array([bin(int(t)).count("1") for t in u])
    lengths = np.array([int(t).bit_length() for t in u])
    lowest = np.array([(int(t) & -int(t)).bit_length() - 1 if t else 32 for t in u])
    columns = [
        x * y,
        (x * y) >> 32,
        (u * v) >> np.uint64(32),
        quotient,
        np.where(y == 0, 0, x - quotient * safe_y),
        np.where(v == 0, 0, u // safe_v),
        np.where(v == 0, 0, u % safe_v),
        x << (y & 31),
        x >> (y & 31),
        u >> (v & np.uint64(31)),
        32 - lengths,
        lowest,
        bits,
        np.minimum(x, y),
        np.maximum(u, v),
        (x & ~y) ^ (x | y),
    ]
    expected = np.stack([c.astype(np.uint64).astype(np.uint32) for c in columns], axis=1)
    return Work((a, b, Out((ELEMENT_COUNT, 16), np.uint32), np.int32(ELEMENT_COUNT)), {2: expected})


@kernel(FILE, GRID, BLOCK)
def integers_64(rng: np.random.Generator, target: Target) -> Work:
    a, b = (rng.integers(-(2**63), 2**63 - 1, ELEMENT_COUNT) for _ in range(2))
    b[::3] = rng.integers(1, 1000, b[::3].size)
    rows = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        u, v, shift = x % 2**64, y % 2**64, y & 63
        quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) if y else 0
        less = min(x, y)
        row = [x + y, x - y, x * y, quotient, u % v if v else 0, x << shift, x >> shift]
        rows.append([t % 2**64 for t in [*row, u >> shift, less, bin(u).count("1")]])
    return Work(
        (a, b, Out((ELEMENT_COUNT, 10), np.uint64), np.int32(ELEMENT_COUNT)),
        {2: np.array(rows, np.uint64)},
    )


@kernel(FILE, GRID, BLOCK)
def polynomial_f64(rng: np.random.Generator, target: Target) -> Work:
    x = rng.standard_normal(ELEMENT_COUNT)
    value = np.zeros(ELEMENT_COUNT)
    for k in range(8, 0, -1):
        value = value * x + 1.0 / k
    expected = value / (x * x + 1.0) + np.sqrt(np.abs(x))
    return Work(
        (x, Out((ELEMENT_COUNT,), np.float64), np.int32(ELEMENT_COUNT)),
        {1: expected},
        rtol=1e-14,
        atol=1e-14,
    )


@kernel(FILE, GRID, BLOCK)
def silu(rng: np.random.Generator, target: Target) -> Work:
    x = _floats(rng)
    wide = x.astype(np.float64)
    return Work(
        (x, Out((ELEMENT_COUNT,), np.float32), np.int32(ELEMENT_COUNT)),
        {1: wide / (1 + np.exp(-wide))},
        rtol=2e-6,
    )


@kernel(FILE, GRID, BLOCK)
def divide_and_root(rng: np.random.Generator, target: Target) -> Work:
    a, b = _floats(rng, scale=1e3), _floats(rng)
    a[:4], b[:4] = [0.0, -1.0, np.inf, 1e-40], [1.0, 0.0, 2.0, 3.0]
    with np.errstate(all="ignore"):
        expected = np.stack([a / b, np.sqrt(np.abs(a))], axis=1)
    return Work((a, b, Out((ELEMENT_COUNT, 2), np.float32), np.int32(ELEMENT_COUNT)), {2: expected})


@kernel(FILE, GRID, BLOCK)
def round_all_ways(rng: np.random.Generator, target: Target) -> Work:
    x = _floats(rng)
    x[:6] = [0.5, 1.5, -0.5, -2.5, 3.0, -0.25]
    ways = [np.floor(x), np.ceil(x), np.trunc(x), np.rint(x), x - np.floor(x)]
    scaled = np.ldexp(x, np.arange(ELEMENT_COUNT) % 5 - 2)
    expected = np.stack([*ways, scaled], axis=1).astype(np.float32)
    return Work((x, Out((ELEMENT_COUNT, 6), np.float32), np.int32(ELEMENT_COUNT)), {1: expected})


@kernel(FILE, GRID, BLOCK)
def convert_types(rng: np.random.Generator, target: Target) -> Work:
    x = _floats(rng, scale=300.0)
    x[:5] = [70000.0, 1e-7, 65519.9, 2.0**-24, -3e-8]
    with np.errstate(all="ignore"):
        half = x.astype(np.float16).view(np.uint16)
    bf16 = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    byte = np.clip(x, 0, 255).astype(np.uint8)
    outs = (
        Out((ELEMENT_COUNT,), np.uint16),
        Out((ELEMENT_COUNT,), np.uint16),
        Out((ELEMENT_COUNT,), np.int32),
        Out((ELEMENT_COUNT,), np.uint8),
    )
    expected = {1: half, 2: bf16, 3: x.astype(np.int32), 4: byte}
    return Work((x, *outs, np.int32(ELEMENT_COUNT)), expected)


@kernel(FILE, GRID, BLOCK)
def compare_specials(rng: np.random.Generator, target: Target) -> Work:
    values = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-42], np.float32)
    x, y = rng.choice(values, ELEMENT_COUNT), rng.choice(values, ELEMENT_COUNT)
    tests = [x < y, x <= y, x == y, x != y, x > y, x >= y, np.isnan(x), np.isinf(y)]
    tests.append(np.isnan(x) | np.isnan(y))
    expected = sum(t.astype(np.int32) << k for k, t in enumerate(tests))
    return Work((x, y, Out((ELEMENT_COUNT,), np.int32), np.int32(ELEMENT_COUNT)), {2: expected})


@kernel(FILE, GRID, BLOCK)
def collatz(rng: np.random.Generator, target: Target) -> Work:
    start = rng.integers(1, 1000, ELEMENT_COUNT).astype(np.uint32)

    def steps(value: int) -> int:
        count = 0
        while value != 1:
            value, count = (3 * value + 1 if value % 2 else value // 2), count + 1
        return count

    expected = np.array([steps(int(s)) for s in start], np.uint32)
    return Work((start, Out((ELEMENT_COUNT,), np.uint32), np.int32(ELEMENT_COUNT)), {1: expected})


@kernel(FILE, (3, 2), (16, 8))
def mandelbrot(rng: np.random.Generator, target: Target) -> Work:
    width, height, limit = 45, 15, 40
    row, column = np.mgrid[:height, :width].astype(np.float32)
    cx, cy = column * np.float32(0.0625) - 2, row * np.float32(0.125) - 1
    x, y, count = np.zeros_like(cx), np.zeros_like(cx), np.zeros(cx.shape, np.uint32)
    for _ in range(limit):
        inside = x * x + y * y <= 4
        step_x, step_y = x * x - y * y + cx, 2 * x * y + cy
        x, y = np.where(inside, step_x, x), np.where(inside, step_y, y)
        count += inside
    sizes = (np.int32(width), np.int32(height), np.int32(limit))
    return Work((Out(count.shape, np.uint32), *sizes), {0: count})


@kernel(FILE, GRID, BLOCK)
def xorshift(rng: np.random.Generator, target: Target) -> Work:
    seed = rng.integers(1, 2**32, ELEMENT_COUNT).astype(np.uint32)
    state = seed.copy()
    for _ in range(9):
        state ^= state << np.uint32(13)
        state ^= state >> np.uint32(17)
        state ^= state << np.uint32(5)
    return Work(
        (seed, Out((ELEMENT_COUNT,), np.uint32), np.int32(ELEMENT_COUNT), np.int32(9)), {1: state}
    )


@kernel(FILE, (3, 2, 2), (8, 4, 4))
def grid_ids(rng: np.random.Generator, target: Target) -> Work:
    bz, by, bx, tz, ty, tx = np.indices((2, 2, 3, 4, 4, 8), dtype=np.uint32).reshape(6, -1)
    expected = bx | by << 4 | bz << 8 | tx << 12 | ty << 18 | tz << 24
    return Work((Out(expected.shape, np.uint32),), {0: expected})


@kernel(FILE, GRID, BLOCK)
def private_array(rng: np.random.Generator, target: Target) -> Work:
    x = rng.integers(0, 1000, ELEMENT_COUNT).astype(np.int32)
    slot = np.zeros((ELEMENT_COUNT, 32), np.int64)
    every = np.arange(ELEMENT_COUNT)
    for k in range(32):
        slot[every, (x + k * 7) & 31] = k * x
    total = sum(slot[every, (k * x) & 31] * (k + 1) for k in range(32))
    return Work(
        (x, Out((ELEMENT_COUNT,), np.int32), np.int32(ELEMENT_COUNT)), {1: total.astype(np.int32)}
    )


@kernel(FILE, GRID, BLOCK)
def function_calls(rng: np.random.Generator, target: Target) -> Work:
    x, i = (
        rng.integers(-1000, 1000, ELEMENT_COUNT).astype(np.int32),
        np.arange(ELEMENT_COUNT, dtype=np.int32),
    )
    expected = x * i + (x + 2 * i + 3 * ELEMENT_COUNT) - (i + 2 * ELEMENT_COUNT + 3 * x)
    return Work(
        (x, Out((ELEMENT_COUNT,), np.int32), np.int32(ELEMENT_COUNT)),
        {1: expected.astype(np.int32)},
    )


@kernel(FILE, GRID, BLOCK)
def jump_table(rng: np.random.Generator, target: Target) -> Work:
    x = rng.integers(-1000, 1000, ELEMENT_COUNT).astype(np.int32)
    ways = [x * 3, x ^ 0x55, (x >> 1) + 11, x + 11, -x, x * x, ~x, ~x]
    return Work(
        (x, Out((ELEMENT_COUNT,), np.int32), np.int32(ELEMENT_COUNT)), {1: np.choose(x & 7, ways)}
    )


@kernel(FILE, GRID, BLOCK)
def unaligned_copy(rng: np.random.Generator, target: Target) -> Work:
    record = np.dtype([("tag", "u1"), ("half", "<u2"), ("word", "<u4"), ("wide", "<u8")])
    source = np.frombuffer(rng.bytes(record.itemsize * ELEMENT_COUNT), record)
    expected = source.copy()
    for k, name in enumerate(record.names, 1):
        expected[name] += np.array(k, record[name])
    size = (record.itemsize * ELEMENT_COUNT,)
    return Work(
        (source.view(np.uint8), Out(size, np.uint8), np.int32(ELEMENT_COUNT)),
        {1: expected.view(np.uint8)},
    )


@kernel(FILE, GRID, BLOCK)
def copy_vector4(rng: np.random.Generator, target: Target) -> Work:
    x = rng.standard_normal((ELEMENT_COUNT * 3, 4)).astype(np.float32)
    return Work((x, Out(x.shape, np.float32), np.int32(ELEMENT_COUNT * 3)), {1: x * 2})


@kernel(FILE, GRID, BLOCK)
def bit_fields(rng: np.random.Generator, target: Target) -> Work:
    x = rng.integers(0, 2**32, ELEMENT_COUNT).astype(np.uint32)
    wide = x.astype(np.uint64)
    signed = ((x >> np.uint32(3)) & np.uint32(0x7F)).astype(np.int32)
    signed = np.where(signed >= 64, signed - 128, signed).astype(np.uint32)
    mirrored = np.array([int(f"{int(t):032b}"[::-1], 2) for t in x], np.uint32)
    # Selector 0x00070205: bytes 5, 2, 7, 0 of {t, 0x12345678}, the lowest result byte first.
    joined = (wide << np.uint64(32)) | np.uint64(0x12345678)
    picked = sum(
        ((joined >> np.uint64(8 * byte)) & np.uint64(0xFF)) << np.uint64(8 * place)
        for place, byte in enumerate((5, 2, 7, 0))
    )
    turned = (x << np.uint32(11)) | (x >> np.uint32(21))
    columns = [(x >> np.uint32(5)) & np.uint32(0x1FF), signed, mirrored, picked, turned]
    expected = np.stack([c.astype(np.uint32) for c in columns], axis=1)
    return Work((x, Out((ELEMENT_COUNT, 5), np.uint32), np.int32(ELEMENT_COUNT)), {1: expected})


@kernel(FILE, GRID, BLOCK)
def saturate_add(rng: np.random.Generator, target: Target) -> Work:
    a, b = (rng.integers(-(2**15), 2**15, ELEMENT_COUNT).astype(np.int16) for _ in range(2))
    expected = np.clip(a.astype(np.int32) + b, -(2**15), 2**15 - 1).astype(np.int16)
    return Work((a, b, Out((ELEMENT_COUNT,), np.int16), np.int32(ELEMENT_COUNT)), {2: expected})
