"""Products and convolutions of fp32 as tf32 on every backend: exact if no matrix unit has tf32,
otherwise within the precision of factors with 10 bits of mantissa. Gradients likewise.
"""

from __future__ import annotations

import numpy as np
import pytest

import ark
from ark.errors import ModelError
from tests.opcheck import Case, check

FACTORS_ERROR = 2.0**-9  # two factors, each truncated to 10 bits


def test_transposes_batches_and_layers(backend: str) -> None:
    rng = np.random.default_rng(4)
    cases = []
    for ta in (False, True):
        for tb in (False, True):
            a = rng.uniform(-1, 1, (2, 24, 40) if ta else (2, 40, 24)), ark.fp32
            b = rng.uniform(-1, 1, (36, 24) if tb else (24, 36)), ark.fp32
            cases.append(
                Case(
                    f"product {ta} {tb}",
                    [a, b],
                    lambda a, b, ta=ta, tb=tb: ark.matmul(
                        a, b, transpose_input=ta, transpose_other=tb, tf32=True
                    ),
                    lambda a, b, ta=ta, tb=tb: (
                        (a.swapaxes(-1, -2) if ta else a) @ (b.T if tb else b)
                    ),
                    4 * FACTORS_ERROR,
                )
            )
    x, w = (rng.uniform(-1, 1, shape) for shape in ((7, 32), (24, 32)))
    layer = [(x, ark.fp32), (w, ark.fp32)]
    cases.append(
        Case("layer", layer, lambda x, w: ark.linear(x, w, tf32=True), lambda x, w: x @ w.T, 0.02)
    )
    check(cases)


def test_convolutions(backend: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    x = rng.uniform(-1, 1, (2, 6, 9, 11)), ark.fp32
    w = rng.uniform(-1, 1, (8, 6, 3, 3)), ark.fp32
    back = rng.uniform(-1, 1, (6, 8, 3, 3)), ark.fp32

    def by_torch(name: str):
        def call(x: np.ndarray, w: np.ndarray) -> np.ndarray:
            f = getattr(torch.nn.functional, name)
            return f(torch.from_numpy(x), torch.from_numpy(w), padding=1).numpy()

        return call

    def conv(x, w):
        return ark.conv(x, w, padding=1, tf32=True)

    def turned(x, w):
        return ark.conv_transpose(x, w, padding=1, tf32=True)

    check(
        [
            Case("conv", [x, w], conv, by_torch("conv2d"), 54 * FACTORS_ERROR),
            Case("transposed", [x, back], turned, by_torch("conv_transpose2d"), 54 * FACTORS_ERROR),
        ]
    )


def test_only_fp32_has_it() -> None:
    a, b = ark.tensor([16, 16], ark.bf16), ark.tensor([16, 16], ark.bf16)
    for call in (ark.matmul, ark.linear):
        with pytest.raises(ModelError, match="tf32 is a precision of fp32"):
            call(a, b, tf32=True)
