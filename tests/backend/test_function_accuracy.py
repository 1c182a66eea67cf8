"""Errors of elementwise functions in units in the last place, compared with float64. Sums and
products of an expression round and overflow in the order in which they are written.
"""

from __future__ import annotations

import numpy as np
import pytest

import ark
from ark.ir.dtype import DataType
from tests.fuzz.program_ops import TORCHS

RANGE_ELEMENTS = 1 << 10  # elements of each range, enough for vectorised loops
MAX_UNITS = 8.0  # in units of 2**-24; the largest observed is 5.2
# Functions that subtract nearly equal numbers near 0: 1 + tanh, or the terms of a fraction.
CANCELLING = ("gelu", "gelu_erf", "mish")
POWERS = (1.5, -1.5, 0.3, 3.0, -2.0, 0.5, 7.0, -0.01, 20.0)


def _arguments() -> np.ndarray:
    draw = np.random.default_rng(1).uniform
    ranges = [draw(-size, size, RANGE_ELEMENTS) for size in (1e-3, 1.0, 10.0, 85.0)]
    wide = np.exp(draw(-80, 80, RANGE_ELEMENTS)) * np.sign(draw(-1, 1, RANGE_ELEMENTS))
    return np.concatenate([*ranges, wide, draw(0.9, 1.1, RANGE_ELEMENTS)]).astype(np.float32)


def _units(result: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest error in units of 2**-24, where the expected result is a normal fp32
    number.
    """
    normal = (np.abs(expected) > 1.2e-38) & (np.abs(expected) < 3.3e38)
    errors = np.abs(result[normal] - expected[normal]) / np.abs(expected[normal])
    return float(errors.max()) * 2.0**24


def test_functions_are_accurate_over_their_range(backend: str) -> None:
    import torch

    values = _arguments()
    tensor = ark.tensor([len(values)], ark.fp32)
    functions = {"tan": torch.tan, **TORCHS}
    names = [name for name in functions if name not in CANCELLING]
    results = {name: getattr(ark, name)(tensor) for name in names}
    powers = {power: ark.pow(tensor, power) for power in POWERS}
    exponents = ark.pow(1.7, tensor)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        tensor.from_numpy(values)
        runtime.run()
        exact = torch.from_numpy(values).double()
        with np.errstate(all="ignore"):
            wide = values.astype(np.float64)
            units = {
                n: _units(r.to_numpy(), functions[n](exact).numpy()) for n, r in results.items()
            }
            for power, result in powers.items():
                exact_power = np.power(wide, np.float64(np.float32(power)))
                units[f"pow {power}"] = _units(result.to_numpy(), exact_power)
            exact_power = np.power(np.float64(np.float32(1.7)), wide)
            units["1.7 to the power of"] = _units(exponents.to_numpy(), exact_power)
    assert {name: far for name, far in units.items() if not far <= MAX_UNITS} == {}


@pytest.mark.parametrize("dtype", [ark.fp16, ark.bf16], ids=lambda d: d.name)
def test_short_gates_are_within_the_rounding_to_16_bits(backend: str, dtype: DataType) -> None:
    bits = 11 if dtype == ark.fp16 else 8
    values = np.linspace(-12, 12, 4096, dtype=np.float32)
    x, y = (ark.tensor([len(values)], dtype) for _ in range(2))
    results = {"silu": ark.silu(x), "swiglu": ark.swiglu(x, y)}
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(values)
        y.from_numpy(np.ones_like(values))
        runtime.run()
        given = x.to_numpy().astype(np.float64)
        expected = given / (1 + np.exp(-given))
        for name, result in results.items():
            error = np.abs(result.to_numpy().astype(np.float64) - expected)
            large = np.abs(expected) > 2.0**-14  # normal numbers of fp16
            assert (error[large] <= np.abs(expected[large]) * (2.0**-bits + 2.0**-16)).all(), name


@pytest.mark.parametrize("size", [7, 4096])
def test_sums_and_products_of_an_expression_keep_their_order(backend: str, size: int) -> None:
    values = np.random.default_rng(0).uniform(-100, 100, size).astype(np.float32)
    values[3] = 1e20
    tensor = ark.tensor([size], ark.fp32)
    rounded = ark.sub(ark.add(tensor, 12582912.0), 12582912.0)  # 3 * 2**22: rounds to an integer
    large = ark.mul(ark.mul(tensor, 1e30), 1e-30)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        tensor.from_numpy(values)
        runtime.run()
        small = np.abs(values) < 1e6
        assert (rounded.to_numpy()[small] == np.rint(values)[small]).all()
        assert np.isinf(large.to_numpy()[3])
