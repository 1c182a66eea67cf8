"""Ops with random shapes, types, views and axes compared with NumPy, many in one launch, run twice:
within the rounding of the type, and with the same bits both times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import ark
from ark.ir.dtype import DataType, bf16, fp16, fp32
from tests.slow import SLOW

EPSILON = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}  # of one rounding
FLOAT_ERROR = 2.0**-20  # of fp32 in a body, for sums of some hundred elements and exponentials
SIZES = st.sampled_from([1, 2, 3, 7, 8, 16, 31, 33, 64, 100, 129, 257])
DTYPES = st.sampled_from([fp32, fp16, bf16])


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layernorm(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def norm_scale(x: np.ndarray) -> np.ndarray:
    return (abs(x) + abs(x).mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def centred_squares(x: ark.Tensor) -> ark.Tensor:
    centred = ark.sub(x, ark.reduce_mean(x, 0))
    return ark.reduce_mean(ark.mul(centred, centred), 0)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def doubled(x: Any, times: int) -> Any:
    for _ in range(times):
        x = x + x
    return x


def parts(row: Any, first: Callable[..., Any], last: Callable[..., Any]) -> Any:
    """Applies `first` to the left half of a row and `last` to the right half; returns the sum of
    the two results.
    """
    half = row.shape[1] // 2 if isinstance(row, np.ndarray) else row.shape()[1] // 2
    return first(row[:, :half]) + last(row[:, half : 2 * half]) if half else first(row)


def halves(rows: int) -> list[int]:
    return [(rows + 1) // 2, rows // 2] if rows > 1 else [1]


def nothing(x: np.ndarray, w: np.ndarray) -> float:
    return 0.0


def one(x: np.ndarray, w: np.ndarray) -> float:
    return 1.0


# name: (ark's function, NumPy's, the size of the terms of a sum), of a view x and a row w.
OPS: dict[str, tuple[Callable[..., Any], ...]] = {
    "add": (lambda x, w: x + w, lambda x, w: x + w, lambda x, w: abs(x) + abs(w)),
    "chain": (
        lambda x, w: ark.gelu(x * w) * 0.5,
        lambda x, w: gelu(x * w) * 0.5,
        lambda x, w: 1 + abs(x * w) ** 3,
    ),
    "softmax": (lambda x, w: ark.softmax(x), lambda x, w: softmax(x), lambda x, w: 1.0),
    "layernorm": (
        lambda x, w: ark.layernorm(x, 1e-5),
        lambda x, w: layernorm(x),
        lambda x, w: norm_scale(x),
    ),
    "layernorm with a weight and a bias": (
        lambda x, w: ark.layernorm(x, 1e-5) * w + w,
        lambda x, w: layernorm(x) * w + w,
        lambda x, w: (norm_scale(x) + 1) * abs(w),
    ),
    "sum rows": (
        lambda x, w: ark.reduce_sum(x, 1),
        lambda x, w: x.sum(1, keepdims=True),
        lambda x, w: abs(x).sum(1, keepdims=True),
    ),
    "max columns": (
        lambda x, w: ark.reduce_max(x, 0),
        lambda x, w: x.max(0, keepdims=True),
        lambda x, w: 0.0,
    ),
    "sum columns": (
        lambda x, w: ark.reduce_sum(x, 0),
        lambda x, w: x.sum(0, keepdims=True),
        lambda x, w: abs(x).sum(0, keepdims=True),
    ),
    "mean of all": (
        lambda x, w: ark.reduce_mean(x, [0, 1]),
        lambda x, w: x.mean(keepdims=True),
        lambda x, w: abs(x).mean(keepdims=True),
    ),
    "squares of rows": (
        lambda x, w: ark.reduce_sum(ark.mul(x, x), 1),
        lambda x, w: (x * x).sum(1, keepdims=True),
        lambda x, w: (x * x).sum(1, keepdims=True),
    ),
    "squares around the means of columns": (
        lambda x, w: centred_squares(x),
        lambda x, w: x.var(0, keepdims=True),
        lambda x, w: (x * x).mean(0, keepdims=True) + abs(x).mean(0, keepdims=True) ** 2,
    ),
    "largest products of columns": (
        lambda x, w: ark.reduce_max(ark.mul(x, w), 0),
        lambda x, w: (x * w).max(0, keepdims=True),
        lambda x, w: abs(x * w).max(0, keepdims=True),
    ),
    "rmsnorm": (
        lambda x, w: ark.rmsnorm(x, w, 1e-5),
        lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w,
        lambda x, w: abs(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w),
    ),
    "where": (
        lambda x, w: ark.where(ark.greater(x, 0.25), x, w),
        lambda x, w: np.where(x > 0.25, x, w),
        lambda x, w: 0.0,
    ),
    "concat": (
        lambda x, w: ark.concat([x, x], 1),
        lambda x, w: np.concatenate([x, x], 1),
        lambda x, w: 0.0,
    ),
    "running sums": (
        lambda x, w: ark.cumsum(x, 1),
        lambda x, w: x.cumsum(1),
        lambda x, w: abs(x).cumsum(1),
    ),
    "transpose": (lambda x, w: ark.transpose(x, [1, 0]), lambda x, w: x.T, lambda x, w: 0.0),
    "gram": (
        lambda x, w: ark.matmul(x, x, transpose_other=True),
        lambda x, w: x @ x.T,
        lambda x, w: abs(x) @ abs(x).T,
    ),
    "product, row, relu": (
        lambda x, w: ark.relu(ark.matmul(x, x, transpose_input=True) + w),
        lambda x, w: np.maximum(x.T @ x + w, 0),
        lambda x, w: abs(x).T @ abs(x) + abs(w),
    ),
    "quotient": (
        lambda x, w: x / (abs(x) + 0.5),
        lambda x, w: x / (abs(x) + 0.5),
        lambda x, w: abs(x),
    ),
    "larger, smaller": (
        lambda x, w: ark.minimum(ark.maximum(x, w), 0.75),
        lambda x, w: np.minimum(np.maximum(x, w), 0.75),
        lambda x, w: 0.0,
    ),
    "clip": (lambda x, w: ark.clip(x, -0.5, 0.75), lambda x, w: x.clip(-0.5, 0.75), nothing),
    "silu": (lambda x, w: ark.silu(x), lambda x, w: x * sigmoid(x), one),
    "gelu by erf": (
        lambda x, w: ark.gelu_erf(x),
        lambda x, w: 0.5 * x * (1 + erf(x / np.sqrt(2))),
        lambda x, w: 1 + abs(x),
    ),
    "power": (
        lambda x, w: ark.exp(x * w) - ark.sqrt(abs(x)),
        lambda x, w: np.exp(x * w) - np.sqrt(abs(x)),
        lambda x, w: (1 + abs(x * w)) * np.exp(x * w) + np.sqrt(abs(x)),
    ),
    "waves": (
        lambda x, w: ark.sin(x) + ark.cos(x * w),
        lambda x, w: np.sin(x) + np.cos(x * w),
        lambda x, w: 4 + abs(x * w),
    ),
    "softplus, softsign": (
        lambda x, w: ark.mish(x) + ark.softsign(x * w),
        lambda x, w: x * np.tanh(np.log1p(np.exp(x))) + x * w / (1 + abs(x * w)),
        lambda x, w: 2 + abs(x),
    ),
    "pieces of lines": (
        lambda x, w: ark.leaky_relu(x, 0.125) + ark.elu(x * w) + ark.hard_swish(x),
        lambda x, w: (
            np.where(x > 0, x, 0.125 * x)
            + np.where(x * w > 0, x * w, np.expm1(x * w))
            + x * np.clip(x / 6 + 0.5, 0, 1)
        ),
        lambda x, w: 2 + abs(x) + abs(x * w),
    ),
    "whole numbers": (
        lambda x, w: ark.floor(4 * x) + ark.round(4 * x),
        lambda x, w: np.floor(4 * x) + np.round(4 * x),
        nothing,
    ),
    "gated": (
        lambda x, w: ark.swiglu(x, x),
        lambda x, w: x * sigmoid(x) * x,
        lambda x, w: x * x,
    ),
    "doubled": (lambda x, w: doubled(x, 10), lambda x, w: 1024 * x, nothing),
    "parts of a sum": (
        lambda x, w: parts(x + w, ark.sigmoid, ark.tanh),
        lambda x, w: parts(x + w, sigmoid, np.tanh),
        lambda x, w: 2.0,
    ),
    "least of columns": (
        lambda x, w: ark.reduce_min(x, 0),
        lambda x, w: x.min(0, keepdims=True),
        nothing,
    ),
    "product of rows": (
        lambda x, w: ark.reduce_prod(x, 1),
        lambda x, w: x.prod(1, keepdims=True),
        lambda x, w: 64 * abs(x).prod(1, keepdims=True),
    ),
    "running products": (
        lambda x, w: ark.cumprod(x, 0),
        lambda x, w: x.cumprod(0),
        lambda x, w: 64 * abs(x).cumprod(0),
    ),
    "place of the largest": (
        lambda x, w: ark.argmax(x, axis=1),
        lambda x, w: x.argmax(1),
        nothing,
    ),
    "place of the least": (
        lambda x, w: ark.argmin(x, axis=0),
        lambda x, w: x.argmin(0),
        nothing,
    ),
    "the largest": (
        lambda x, w: ark.topk(x, min(4, x.shape()[1]))[0],
        lambda x, w: -np.sort(-x, 1)[:, :4],
        nothing,
    ),
    "log of softmax": (
        lambda x, w: ark.log_softmax(x),
        lambda x, w: np.log(softmax(x)),
        lambda x, w: 8 + abs(x),
    ),
    "flip": (lambda x, w: ark.flip(x, [0, 1]), lambda x, w: x[::-1, ::-1], nothing),
    "pad": (
        lambda x, w: ark.pad(x, [(1, 2), (0, 3)], value=0.5),
        lambda x, w: np.pad(x, [(1, 2), (0, 3)], constant_values=0.5),
        nothing,
    ),
    "every second": (
        lambda x, w: ark.strided_slice(
            x, [0, 0], [-(-x.shape()[0] // 2), -(-x.shape()[1] // 3)], [2, 3]
        ),
        lambda x, w: x[::2, ::3],
        nothing,
    ),
    "tiled": (lambda x, w: ark.tile(x, [2, 3]), lambda x, w: np.tile(x, [2, 3]), nothing),
    "repeated": (
        lambda x, w: ark.expand(w, [3, w.shape()[0]]),
        lambda x, w: np.broadcast_to(w, (3, len(w))),
        nothing,
    ),
    "triangle": (
        lambda x, w: ark.tril(x, 1) + ark.triu(x, 2),
        lambda x, w: x,
        nothing,
    ),
    "halves": (
        lambda x, w: ark.concat(ark.split(x, halves(x.shape()[0]), 0)[::-1], 0),
        lambda x, w: np.concatenate([x[(len(x) + 1) // 2 :], x[: (len(x) + 1) // 2]]),
        nothing,
    ),
    "another shape": (
        lambda x, w: ark.transpose(ark.reshape(ark.copy(x), [1, x.shape()[1], -1]), [2, 0, 1]),
        lambda x, w: x.reshape(1, x.shape[1], -1).transpose(2, 0, 1),
        nothing,
    ),
}


@st.composite
def calls(draw: Callable[..., Any]) -> tuple[str, DataType, tuple[int, int], tuple[int, int]]:
    """Draws an op, its type, the shape of its input, and its offset in a larger tensor of which it
    is a view.
    """
    name = draw(st.sampled_from(sorted(OPS)))
    shape = draw(SIZES), draw(SIZES)
    before = draw(st.sampled_from([(0, 0), (1, 0), (0, 8), (3, 5)]))
    return name, draw(DTYPES), shape, before


@settings(
    max_examples=20 if SLOW else 2,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(st.lists(calls(), min_size=6, max_size=6), st.integers(0, 2**31))
def test_any_shapes_views_and_types(fresh_model, plan: list[Any], seed: int) -> None:
    """Every result equals NumPy's, and a second run gives the same bits."""
    fresh_model()
    rng = np.random.default_rng(seed)
    calls = []
    for name, dtype, shape, before in plan:
        around = tuple(n + 2 * b for n, b in zip(shape, before, strict=True))
        whole, row = ark.tensor(list(around), dtype), ark.tensor([shape[1]], dtype)
        part = tuple(slice(b, b + n) for n, b in zip(shape, before, strict=True))
        x = whole[part[0], part[1]] if any(before) else whole
        calls.append((name, dtype, whole, row, part, OPS[name][0](x, row)))
    values = []
    with ark.Runtime() as runtime:
        runtime.launch()
        for _, dtype, whole, row, _, _ in calls:
            arrays = [rng.standard_normal(t.shape()).astype(dtype.numpy) for t in (whole, row)]
            whole.from_numpy(arrays[0])
            row.from_numpy(arrays[1])
            values.append([a.astype(np.float64) for a in arrays])
        runtime.run()
        first = [m[-1].to_numpy().copy() for m in calls]
        runtime.run()
        repeated = [m[-1].to_numpy().copy() for m in calls]
    for (name, dtype, _, _, part, _), (x, w), got, second in zip(
        calls, values, first, repeated, strict=True
    ):
        want, size = (f(x[part], w) for f in OPS[name][1:])
        error = np.abs(got.astype(np.float64).reshape(want.shape) - want)
        rounding = 0.0 if got.dtype.kind in "iu" else EPSILON[dtype.name]
        bound = rounding * (np.abs(want) + 2.0**-10) + FLOAT_ERROR * size
        assert (error <= bound).all(), (name, dtype.name, x.shape, error.max())
        assert got.tobytes() == second.tobytes(), (name, dtype.name, "differs from run to run")


@pytest.fixture
def fresh_model() -> Callable[[], None]:
    return lambda: ark.init(backend="cpu")
