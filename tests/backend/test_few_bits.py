"""Products of 8-bit types and of fp32 as tf32, casts of 8-bit floats: beside NumPy and torch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import ark
from ark.errors import ModelError
from tests.opcheck import Case, check

SMALL = (ark.fp8_e4m3, ark.fp8_e5m2)
SHAPES = [(33, 70, 130), (1, 64, 256), (3, 50, 77), (96, 128, 144)]


def codes() -> np.ndarray:
    """Every value of one byte, in two rows."""
    return np.arange(256, dtype=np.uint8).reshape(2, 128)


@pytest.mark.parametrize("dtype", SMALL)
def test_every_code_is_read_and_written(backend, dtype) -> None:
    small, wide = ark.tensor([2, 128], dtype), ark.tensor([512], ark.fp32)
    read, made = ark.cast(small, ark.fp32), ark.cast(wide, dtype)
    numbers = codes().view(dtype.to_numpy())
    # What lies between two neighbours, what is half of the least, what is too large.
    edges = np.sort(numbers.astype(np.float32)[np.isfinite(numbers.astype(np.float32))])
    values = np.concatenate([edges, (edges[1:] + edges[:-1]) / 2, [1e9, -1e9, np.nan]])
    values = np.resize(values, 512).astype(np.float32)
    with ark.Runtime() as runtime:
        runtime.launch()
        small.from_numpy(numbers)
        wide.from_numpy(values)
        runtime.run()
        np.testing.assert_array_equal(read.to_numpy(), numbers.astype(np.float32))
        got = made.to_numpy()
    want = values.astype(dtype.to_numpy())
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def test_products(backend) -> None:
    rng = np.random.default_rng(7)
    cases = []
    pairs = [*itertools.product(SMALL, SMALL), (ark.int8, ark.int8), (ark.fp32, ark.fp32)]
    for number, (left, right) in enumerate(pairs):
        m, n, k = SHAPES[number % len(SHAPES)]
        for ta, tb in itertools.product((False, True), repeat=2):
            shapes = (k, m) if ta else (m, k), (n, k) if tb else (k, n)
            whole = left == ark.int8
            arrays = [
                rng.integers(-128, 128, s) if whole else rng.standard_normal(s) for s in shapes
            ]

            def build(a, b, ta=ta, tb=tb, left=left):
                made = ark.matmul(
                    a,
                    b,
                    transpose_input=ta,
                    transpose_other=tb,
                    dtype=ark.fp32 if left in SMALL else None,
                    tf32=left == ark.fp32,
                )
                return ark.mul(ark.cast(made, ark.fp32), 0.25) if ta else made

            def expected(a, b, ta=ta, tb=tb):
                made = (a.T if ta else a) @ (b.T if tb else b)
                return made * 0.25 if ta else made

            inputs = list(zip(arrays, (left, right), strict=True))
            # Where units read tf32, 10 bits of each factor.
            tolerance = 2.0**-9 * k**0.5 if left == ark.fp32 else None
            cases.append(Case(f"{left} {right} {ta} {tb}", inputs, build, expected, tolerance))
    check(cases)


def test_torchs_product_is_the_same(backend) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(8)
    numbers = [rng.integers(-128, 128, s).astype(np.int8) for s in ((32, 64), (48, 64))]
    floats = [torch.from_numpy(rng.standard_normal(s).astype(np.float32)) for s in ((32, 64),) * 2]
    small = [f.to(torch.float8_e4m3fn) for f in floats]
    a, b = (ark.tensor(list(n.shape), ark.int8) for n in numbers)
    x, y = (ark.tensor(list(n.shape), ark.fp8_e4m3) for n in small)
    whole = ark.matmul(a, b, transpose_other=True)
    real = ark.matmul(x, y, transpose_other=True, dtype=ark.fp32)
    with ark.Runtime() as runtime:
        runtime.launch()
        for tensor, array in zip((a, b, x, y), (*numbers, *small), strict=True):
            tensor.copy(array)
        runtime.run()
        made, close = whole.to_numpy(), real.to_numpy()
    left, right = (torch.from_numpy(n) for n in numbers)
    np.testing.assert_array_equal(made, torch._int_mm(left, right.t()).numpy())
    want = small[0].float() @ small[1].float().t()
    np.testing.assert_allclose(close, want.numpy(), rtol=1e-5, atol=1e-5)


def test_what_is_no_product_is_refused() -> None:
    ark.init(backend="cpu")
    a, b = ark.tensor([8, 8], ark.int8), ark.tensor([8, 8], ark.fp8_e4m3)
    c = ark.tensor([8, 8], ark.bf16)
    for left, right, how, words in (
        (a, b, {}, "needs fp32, fp16 or bf16"),
        (a, a, {"dtype": ark.fp32}, "gives int32"),
        (b, b, {"dtype": ark.int32}, "gives fp32, fp16 or bf16"),
        (c, c, {"tf32": True}, "tf32 is a precision of fp32"),
    ):
        with pytest.raises(ModelError, match=words):
            ark.matmul(left, right, **how)
