"""Weights of few bits, dequantised and multiplied, and quantised values, compared with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ark
from ark.ir.dtype import RowType, row_type
from ark.ir.rows import row_bytes, row_values
from tests.emulated import few_emulated
from tests.opcheck import Case, check
from tests.slow import slow


@pytest.mark.parametrize(
    "dtype",
    few_emulated(
        (ark.int4, ark.uint4, ark.fp4, ark.int8, ark.fp8_e4m3, ark.fp8_e5m2), ark.fp4, ark.fp8_e4m3
    ),
    ids=str,
)
def test_weights_of_few_bits(backend: str, dtype: Any) -> None:
    """Weights of few bits are dequantised, and multiplied by few rows (from the codes) and by many
    rows (dequantised first), with NumPy's results.
    """
    rng = np.random.default_rng(6)
    if dtype is ark.fp4:
        weight = rng.integers(0, 16, (40, 96)).astype(np.uint8).view(dtype.numpy).astype(float)
    else:
        weight = rng.integers(*((0, 16) if dtype is ark.uint4 else (-8, 8)), (40, 96))
    # Zero points need not be integers: they are not in GGUF and other formats, which store an
    # offset in place of a zero point.
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


def encoded(rng: np.random.Generator, dtype: RowType, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of random codes as bytes, and their values."""
    if dtype.codes.name.startswith("fp"):
        codes = rng.standard_normal((rows, dtype.columns)) * 2
    else:
        codes = rng.integers(
            *((0, 16) if dtype.codes.name[0] == "u" else (-8, 8)), (rows, dtype.columns)
        )
    scales, zeros = (rng.uniform(0.1, 1, (rows, dtype.groups)) for _ in range(2))
    stored = row_bytes(dtype, codes, scales, 5 * zeros if dtype.zeros else None)
    return stored, row_values(dtype, stored).astype(np.float64)


# The weights: (codes, columns, group, type of scales, True if there are zero points). Some groups
# suit matrix units and others do not.
ROWS: list[tuple[Any, int, int, Any, bool]] = [
    (ark.int4, 1024, 128, ark.bf16, False),
    (ark.int8, 1024, 1024, ark.fp32, False),
    (ark.fp8_e4m3, 512, 512, ark.fp32, False),
    (ark.fp4, 512, 32, ark.bf16, False),
    (ark.uint4, 512, 64, ark.fp16, True),
    (ark.int4, 96, 24, ark.fp16, False),
    (ark.uint8, 64, 8, ark.fp32, True),
]


FEW_ROWS = [c if n in (0, 4) else pytest.param(c, marks=slow) for n, c in enumerate(ROWS)]


@pytest.mark.emulated("slow")
@pytest.mark.parametrize("numbers", [(1,), (3, 16)], ids=str)
@pytest.mark.parametrize("case", FEW_ROWS, ids=lambda c: "-".join(map(str, c[:3])))
def test_linear_layers_read_codes_and_scales(
    backend: str, case: Any, numbers: tuple[int, ...]
) -> None:
    """Linear layers with quantised weights, after a norm and before a residual, for one input row,
    several, and many (which dequantise the weight first). A weight in state memory, which is not
    streamed, is multiplied by three rows.
    """
    codes, columns, group, scales, zeros = case
    rng = np.random.default_rng(columns + group)
    dtype = row_type(codes, columns, group, scales, zeros, ark.bf16)
    rows, values = encoded(rng, dtype, 72)
    weight, norm = ark.parameter((72, columns), dtype), ark.parameter((columns,))
    state = ark.tensor((72, columns), dtype)
    results = {}
    for number in numbers:
        x, added = ark.tensor((number, columns)), ark.tensor((number, 72))
        normed = ark.rmsnorm(x, norm)
        results[number] = x, added, ark.add(ark.linear(normed, weight), added)
        if number == 3:
            apart = ark.linear(normed, state)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        weight.from_numpy(rows)
        factors = rng.uniform(0.5, 1.5, columns).astype(np.float32)
        norm.from_numpy(factors)
        arrays = {}
        for number, (x, added, _) in results.items():
            given = [rng.uniform(-1, 1, t.shape()).astype(np.float32) for t in (x, added)]
            arrays[number] = given
            x.from_numpy(given[0])
            added.from_numpy(given[1])
        state.from_numpy(rows)
        runtime.run()
        np.testing.assert_array_equal(weight.to_numpy(), rows)
        if 3 in arrays:
            np.testing.assert_allclose(
                apart.to_numpy(), results[3][2].to_numpy() - arrays[3][1], atol=2e-2, rtol=2e-2
            )
        for number, (x, added) in arrays.items():
            normed = factors * x / np.sqrt((x.astype(float) ** 2).mean(-1, keepdims=True) + 1e-5)
            most = np.abs(normed) @ np.abs(values).T
            got = results[number][2].to_numpy()
            room = np.abs(got - (normed @ values.T + added)) / most
            # Either the input or the dequantised weights are rounded to bf16. The errors of the
            # terms of a sum are random, so the error of the sum grows with the root of its length.
            assert room.max() < 4e-3 / np.sqrt(columns / 64), (number, room.max())


def test_quantising_loses_half_a_step(backend: str) -> None:
    rng = np.random.default_rng(7)
    array = rng.normal(0, 1, (6, 64)).astype(np.float32)
    source = ark.tensor([6, 64])
    quantized, scales = ark.quantize(source, 32)
    back = ark.dequantize(quantized, scales)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        source.from_numpy(array)
        runtime.run()
        steps = np.abs(array.reshape(6, 2, 32)).max(-1) / 7
        np.testing.assert_allclose(scales.to_numpy(), steps, rtol=1e-6)
        assert (np.abs(back.to_numpy() - array) <= steps.repeat(32, -1) * 0.5001).all()
        assert quantized.to_numpy().dtype == ark.int4.numpy
