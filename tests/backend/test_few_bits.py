"""Weights of few bits, dequantised and multiplied, and values quantised, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ark
from tests.emulated import few_emulated
from tests.opcheck import Case, check


@pytest.mark.parametrize(
    "dtype",
    few_emulated(
        (ark.int4, ark.uint4, ark.fp4, ark.int8, ark.fp8_e4m3, ark.fp8_e5m2), ark.fp4, ark.fp8_e4m3
    ),
    ids=str,
)
def test_weights_of_few_bits(backend: str, dtype: Any) -> None:
    """Dequantised, and multiplied by few rows (from the bits) and by many."""
    rng = np.random.default_rng(6)
    if dtype is ark.fp4:
        weight = rng.integers(0, 16, (40, 96)).astype(np.uint8).view(dtype.numpy).astype(float)
    else:
        weight = rng.integers(*((0, 16) if dtype is ark.uint4 else (-8, 8)), (40, 96))
    # Zeros with fractions, as GGUF's and others' offsets give them.
    scales, zeros = rng.uniform(0.1, 1, (40, 6)), rng.uniform(0, 5, (40, 6))

    def full(w: np.ndarray, s: np.ndarray, z: Any = 0) -> np.ndarray:
        wide = s.repeat(16, -1)
        return (w - (z.repeat(16, -1) if isinstance(z, np.ndarray) else 0)) * wide

    w, s, z = (weight, dtype), (scales, ark.fp32), (zeros, ark.fp32)
    cases = [
        Case("values", [w, s, z], lambda *t: ark.dequantize(*t), full),
        Case("bf16", [w, (scales, ark.bf16)], lambda *t: ark.dequantize(*t, dtype=ark.bf16), full),
    ]
    for rows in (1, 3, 8, 12):
        x = (rng.uniform(-1, 1, (rows, 96)), ark.fp32)
        cases.append(
            Case(
                f"{rows} rows",
                [x, w, s, z],
                ark.quantized_linear,
                lambda x, w, s, z: x @ full(w, s, z).T,
                1e-4,
            )
        )
        cases.append(
            Case(
                f"{rows} rows without zeros",
                [x, w, s],
                ark.quantized_linear,
                lambda x, w, s: x @ full(w, s).T,
                1e-4,
            )
        )
    check(cases)


def test_quantising_loses_half_a_step(backend: str) -> None:
    rng = np.random.default_rng(7)
    array = rng.normal(0, 1, (6, 64)).astype(np.float32)
    source = ark.tensor([6, 64])
    made, scales = ark.quantize(source, 32)
    back = ark.dequantize(made, scales)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        source.from_numpy(array)
        runtime.run()
        steps = np.abs(array.reshape(6, 2, 32)).max(-1) / 7
        np.testing.assert_allclose(scales.to_numpy(), steps, rtol=1e-6)
        assert (np.abs(back.to_numpy() - array) <= steps.repeat(32, -1) * 0.5001).all()
        assert made.to_numpy().dtype == ark.int4.numpy
