"""Quotients, interpolations and functions for which the textbook formula loses the result, compared
with torch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import ark


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")
    torch._dynamo.reset()


def _compiled(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.compile(function, backend="ark")(*inputs)
    return result


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_floor_division_of_the_least_integer_equals_torch(dtype: torch.dtype) -> None:
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    x = torch.tensor([least, most, least, -7, 7, least, most, least, 6], dtype=dtype)
    y = torch.tensor([7, -2, -7, 2, -2, most, least, least, 3], dtype=dtype)
    assert torch.equal(_compiled(torch.floor_divide, x, y), torch.floor_divide(x, y))
    assert torch.equal(_compiled(lambda x: x // 7, x), x // 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floor_division_of_floats_equals_torch(dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    x = [1.0, -1.0, 0.7, 6.0, 5.0, 1e4, inf, 0.0, 3.0, -3.0, 7.0, -7.0, 0.0, nan, -5.0]
    y = [0.1, 0.1, 0.1, 0.2, -0.3, 7.0, 2.0, 0.0, inf, inf, 0.0, 0.0, -3.0, 2.0, 5.0]
    a, b = torch.tensor(x).to(dtype), torch.tensor(y).to(dtype)
    torch.testing.assert_close(
        _compiled(torch.floor_divide, a, b), torch.floor_divide(a, b), equal_nan=True
    )
    for number in (0.1, -3.0, 0.0):
        result = _compiled(lambda x, by=number: torch.div(x, by, rounding_mode="floor"), a)
        expected = torch.div(a, number, rounding_mode="floor")
        torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.parametrize("weight", [1.0, 0.75, 0.25, -0.5, torch.tensor([1.0, 0.2, 0.99])])
def test_interpolation_keeps_a_small_end(weight: float | torch.Tensor) -> None:
    x, y = torch.tensor([1e8, 1.0, -1e10]), torch.tensor([1.0, 2.0, 3.0])
    result = _compiled(lambda x, y: torch.lerp(x, y, weight), x, y)
    torch.testing.assert_close(result, torch.lerp(x, y, weight))


def test_small_values_of_erfc_are_kept() -> None:
    x = torch.linspace(-6, 9, 2001)
    exact = torch.erfc(x.double())
    error = ((_compiled(torch.erfc, x).double() - exact) / exact).abs().max()
    assert error < 5e-6


def test_binary_logarithm_of_powers_of_two_is_exact() -> None:
    powers = 2.0 ** torch.arange(-126, 128)
    assert torch.equal(_compiled(torch.log2, powers), torch.arange(-126.0, 128.0))
