"""Ops of random shapes, types, views and axes against NumPy, many in one launch, run twice: within
what the type's rounding allows, and the same bits both times.
"""

from __future__ import annotations

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
FLOAT = 2.0**-20  # of fp32 inside of a body: sums of some hundred elements, exponentials
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


# name: (ark's, NumPy's, the size of what is added up) over a view x and a row w of its columns.
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
}


@st.composite
def calls(draw: Callable[..., Any]) -> tuple[str, DataType, tuple[int, int], tuple[int, int]]:
    """An op, its type, the shape of what it reads, and what of a larger tensor lies before that."""
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
    """What every call gives is NumPy's, and the same bits again."""
    fresh_model()
    rng = np.random.default_rng(seed)
    made = []
    for name, dtype, shape, before in plan:
        around = tuple(n + 2 * b for n, b in zip(shape, before, strict=True))
        whole, row = ark.tensor(list(around), dtype), ark.tensor([shape[1]], dtype)
        part = tuple(slice(b, b + n) for n, b in zip(shape, before, strict=True))
        x = whole[part[0], part[1]] if any(before) else whole
        made.append((name, dtype, whole, row, part, OPS[name][0](x, row)))
    values = []
    with ark.Runtime() as runtime:
        runtime.launch()
        for _, dtype, whole, row, _, _ in made:
            arrays = [rng.standard_normal(t.shape()).astype(dtype.numpy) for t in (whole, row)]
            whole.from_numpy(arrays[0])
            row.from_numpy(arrays[1])
            values.append([a.astype(np.float64) for a in arrays])
        runtime.run()
        first = [m[-1].to_numpy().copy() for m in made]
        runtime.run()
        again = [m[-1].to_numpy().copy() for m in made]
    for (name, dtype, _, _, part, _), (x, w), got, second in zip(
        made, values, first, again, strict=True
    ):
        want, size = (f(x[part], w) for f in OPS[name][1:])
        error = np.abs(got.astype(np.float64).reshape(want.shape) - want)
        bound = EPSILON[dtype.name] * (np.abs(want) + 2.0**-10) + FLOAT * size
        assert (error <= bound).all(), (name, dtype.name, x.shape, error.max())
        assert got.tobytes() == second.tobytes(), (name, dtype.name, "differs from run to run")


@pytest.fixture
def fresh_model() -> Callable[[], None]:
    return lambda: ark.init(backend="cpu")
