"""Functions outside of their domain, at its ends, and of NaN, compared with NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import ark
from tests.emulated import few_emulated

NEAR_FP32_MAX = 3.4e38
VALUES = np.array(
    [
        np.nan,
        np.inf,
        -np.inf,
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        -0.5,
        2.0,
        -2.0,
        1e19,
        1e30,
        NEAR_FP32_MAX,
        -NEAR_FP32_MAX,
    ],
    np.float32,
)
FUNCTIONS = {
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atanh": np.arctanh,
    "erfc": np.vectorize(math.erfc),
    "expm1": np.expm1,
    "ln": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
}


def test_functions_at_special_values(backend: str) -> None:
    ark.init(backend=backend)
    x, y = (np.ascontiguousarray(side.ravel()) for side in np.meshgrid(VALUES, VALUES))
    alone = ark.tensor([len(VALUES)])
    left, right = ark.tensor([len(x)]), ark.tensor([len(x)])
    outputs = {name: getattr(ark, name)(alone) for name in FUNCTIONS}
    power, angle = ark.pow(left, right), ark.atan2(left, right)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for tensor, values in ((alone, VALUES), (left, x), (right, y)):
            tensor.from_numpy(values)
        runtime.run()
        with np.errstate(all="ignore"):
            for name, function in FUNCTIONS.items():
                want = function(VALUES.astype(np.float64)).astype(np.float32)
                np.testing.assert_allclose(
                    outputs[name].to_numpy(), want, rtol=2e-5, atol=2e-6, err_msg=name
                )
            want = np.power(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
            np.testing.assert_allclose(power.to_numpy(), want, rtol=2e-5, err_msg="pow")
            want = np.arctan2(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
            np.testing.assert_allclose(angle.to_numpy(), want, rtol=2e-5, err_msg="atan2")


def test_functions_keep_the_digits_of_small_values(backend: str) -> None:
    """expm1, log1p and similar functions equal torch's in fp64, relative to the value, for small
    arguments, for which e^x - 1 would lose digits.
    """
    ark.init(backend=backend)
    sizes = np.geomspace(1e-30, 30.0, 200)
    values = np.concatenate([sizes, -sizes]).astype(np.float32)
    x = ark.tensor([len(values)])
    functions = {
        "expm1": torch.expm1,
        "log1p": torch.log1p,
        "elu": torch.nn.functional.elu,
        "selu": torch.selu,
        "log_sigmoid": torch.nn.functional.logsigmoid,
        "mish": torch.nn.functional.mish,
    }
    outputs = {name: getattr(ark, name)(x) for name in functions}
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(values)
        runtime.run()
        for name, function in functions.items():
            want = function(torch.from_numpy(values.astype(np.float64))).numpy()
            np.testing.assert_allclose(outputs[name].to_numpy(), want, rtol=4e-6, err_msg=name)


def ends(dtype: Any) -> np.ndarray:
    """Returns values over the whole range of a type, of both signs: the smallest, infinities, those
    where exponentials overflow, large angles, and NaN.
    """
    near = [0.0, 1e-45, 1.1754944e-38, 1e-6, 0.3, 1.0, 3.0, 8.5, 11.0, 88.3, 88.7, 88.8, 89.4, 89.5]
    far = [104.0, 1e3, 65504.0, 1e5, 2.0**31, 5e9, 1e15, 1e22, 7e30, 3.4028235e38, np.inf]
    sizes = np.concatenate([near, far, np.geomspace(1e-40, 3e38, 60), np.linspace(0, 92, 60)])
    with np.errstate(over="ignore"):
        return np.concatenate([sizes, -sizes, [np.nan]]).astype(np.float32).astype(dtype.numpy)


def agree(name: str, got: np.ndarray, want: np.ndarray) -> None:
    """Asserts equality within the type's rounding, and within 1e-36 for smaller results in fp32. A
    result that is within rounding of the type's largest number may be infinite.
    """
    tolerance = {np.dtype(np.float32): 6e-6, np.dtype(np.float16): 1.1e-3}.get(got.dtype, 9e-3)
    with np.errstate(all="ignore"):
        want = want.astype(np.float32).astype(got.dtype)
        most = 3.39e38 if tolerance != 1.1e-3 else 65500.0
        got, want = (np.clip(v.astype(np.float64), -most, most) for v in (got, want))
    small = 1.2e-7 if tolerance == 1.1e-3 else 4e-37
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=small, err_msg=name)


TORCHS: dict[str, Any] = {
    **{name: getattr(torch, name) for name in ("exp", "expm1", "log1p", "sqrt", "rsqrt", "erf")},
    **{name: getattr(torch, name) for name in ("reciprocal", "sigmoid", "tanh", "sin", "cos")},
    **{name: getattr(torch, name) for name in ("tan", "asin", "acos", "atan", "sinh", "cosh")},
    **{name: getattr(torch, name) for name in ("asinh", "acosh", "atanh", "floor", "ceil")},
    **{name: getattr(torch, name) for name in ("round", "abs", "neg", "relu", "selu")},
    "ln": torch.log,
    "silu": torch.nn.functional.silu,
    "elu": torch.nn.functional.elu,
    "log_sigmoid": torch.nn.functional.logsigmoid,
    "mish": torch.nn.functional.mish,
    "softsign": torch.nn.functional.softsign,
}
TORCHS_OF_TWO: dict[str, Any] = {
    name: getattr(torch, name)
    for name in ("add", "sub", "mul", "div", "fmod", "atan2", "hypot", "maximum", "minimum")
}


@pytest.mark.parametrize(
    "dtype", few_emulated((ark.fp32, ark.fp16, ark.bf16), ark.fp32), ids=lambda d: d.name
)
def test_functions_over_the_whole_range_equal_torch(backend: str, dtype: Any) -> None:
    """Functions over the whole range of a type equal torch's in fp64: at the ends of the range, for
    large angles, and NaN.
    """
    values = ends(dtype)
    some = values[:: 3 if backend == "cpu" else 7]
    left, right = (np.ascontiguousarray(v.ravel()) for v in np.meshgrid(some, some))
    x, a, b = ark.tensor([len(values)], dtype), *(ark.tensor([len(left)], dtype) for _ in "ab")
    outputs = {name: getattr(ark, name)(x) for name in TORCHS}
    pairs = {name: getattr(ark, name)(a, b) for name in TORCHS_OF_TWO}
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for tensor, given in ((x, values), (a, left), (b, right)):
            tensor.from_numpy(given)
        runtime.run()
        wide = [torch.from_numpy(v.astype(np.float64)) for v in (values, left, right)]
        for name, function in TORCHS.items():
            agree(name, outputs[name].to_numpy(), function(wide[0]).numpy())
        for name, function in TORCHS_OF_TWO.items():
            agree(name, pairs[name].to_numpy(), function(*wide[1:]).numpy())


def test_expression_is_computed_in_its_order(backend: str) -> None:
    """Fused elementwise ops overflow and round exactly where separate ops do."""
    given = np.array([1e30, 3e38, 1.4, -2.6, 1e-30, 123456.7], np.float32)
    x = ark.tensor([6])
    outputs = {
        "product": ark.mul(ark.mul(x, 1e30), 1e-30),
        "sum": ark.sub(ark.add(x, 12582912.0), 12582912.0),
        "far": ark.add(ark.sub(x, -3e38), -3e38),
        "gated": ark.mul(ark.silu(ark.neg(ark.div(x, 1e30))), ark.mul(x, 1e8)),
    }
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(given)
        runtime.run()
        v = torch.from_numpy(given)
        f = np.float32
        with np.errstate(over="ignore"):
            want = {
                "product": given * f(1e30) * f(1e-30),
                "sum": given + f(12582912.0) - f(12582912.0),
                "far": given - f(-3e38) + f(-3e38),
                "gated": (torch.nn.functional.silu(-(v / 1e30)) * (v * 1e8)).numpy(),
            }
        for name, tensor in outputs.items():
            np.testing.assert_allclose(tensor.to_numpy(), want[name], rtol=3e-6, err_msg=name)


@pytest.mark.parametrize(
    "dtype", few_emulated((ark.fp32, ark.fp16, ark.bf16), ark.fp16), ids=lambda d: d.name
)
def test_logsumexp_of_infinities_equals_torch(backend: str, dtype: Any) -> None:
    inf = np.inf
    rows = [[-inf] * 4, [inf, 0, 1, 2], [inf, -inf, 0, 0], [-inf, 3, -inf, -1], [9, 8, 7, 100]]
    rows += [[np.nan, 0, 0, 1], [6e4] * 4, [-6e4, -6e4, -6e4, -5.9e4]]
    values = np.array(rows, np.float32).astype(dtype.numpy)
    x = ark.tensor(list(values.shape), dtype)
    by_row, other = ark.logsumexp(x, -1, keepdims=False), ark.logsumexp(x, [0, 1])
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(values)
        runtime.run()
        wide = torch.from_numpy(values.astype(np.float64))
        agree("rows", by_row.to_numpy(), torch.logsumexp(wide, -1).numpy())
        agree("all", other.to_numpy(), torch.logsumexp(wide, (0, 1), keepdim=True).numpy())


@pytest.mark.parametrize(
    "dtype", few_emulated((ark.fp32, ark.fp16, ark.bf16), ark.fp32), ids=lambda d: d.name
)
def test_softmax_of_nothing_is_zero(backend: str, dtype: Any) -> None:
    """For rows of -inf only, safe_softmax gives zeros and softmax gives NaN, as in torch."""
    inf, rng = np.inf, np.random.default_rng(3)
    outputs, inputs, given = [], [], []
    for columns in (5, 96, 700):
        values = rng.uniform(-9, 9, (7, columns))
        values[0], values[1, 1:], values[2, 0] = -inf, -inf, inf
        values[3, 0], values[4], values[4, -1] = np.nan, -inf, np.nan
        given.append(values.astype(np.float32).astype(dtype.numpy))
        inputs.append(ark.tensor(list(values.shape), dtype))
        outputs.append((ark.safe_softmax(inputs[-1]), ark.softmax(inputs[-1])))
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for tensor, values in zip(inputs, given, strict=True):
            tensor.from_numpy(values)
        runtime.run()
        for (safe, plain), values in zip(outputs, given, strict=True):
            wide = torch.from_numpy(values.astype(np.float64))
            agree("safe", safe.to_numpy(), torch.ops.aten._safe_softmax(wide, -1).numpy())
            agree("plain", plain.to_numpy(), torch.softmax(wide, -1).numpy())


def test_attention_of_nan_is_nan(backend: str) -> None:
    """A query that contains NaN makes only its own row of attention NaN. Masked keys that are NaN
    have no effect.
    """
    rows, context, width = 9, 12, 16
    rng = np.random.default_rng(0)
    q, k, v = (rng.uniform(-1, 1, s).astype(np.float32) for s in
               ((rows, 2 * width), (2, context, width), (2, context, width)))  # fmt: skip
    q[3] = np.nan
    inputs = [ark.tensor(list(a.shape)) for a in (q, k, v)]
    attended = ark.attention(*inputs)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for tensor, values in zip(inputs, (q, k, v), strict=True):
            tensor.from_numpy(values)
        runtime.run()
        got = attended.to_numpy()
    assert np.isnan(got[3]).all()
    assert np.isfinite(np.delete(got, 3, 0)).all()
