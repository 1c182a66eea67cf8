"""Ordering with NaN, which counts as the largest number, as in torch: argmax, argmin, max, min,
topk, with row lengths for each way of computing them; topk of equal elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ark
from tests.emulated import few_emulated

KINDS = few_emulated((ark.fp32, ark.fp16, ark.bf16), ark.fp16)


def rows(count: int, columns: int, dtype: Any) -> np.ndarray:
    """Returns random rows: some without NaN, some with NaN, some with infinities, some of
    NaN only.
    """
    rng = np.random.default_rng(columns)
    values = rng.integers(-30, 30, (count, columns)).astype(np.float64)
    values[rng.random(values.shape) < 0.05] = np.inf
    values[rng.random(values.shape) < 0.05] = -np.inf
    odd = rng.random(values.shape) < 0.1
    odd[::3] = False
    values[odd] = np.nan
    values[1], values[4] = np.nan, -np.inf
    values[2, -1] = np.nan
    return values.astype(np.float32).astype(dtype.numpy)


def in_torch(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float64))


@pytest.mark.parametrize("dtype", KINDS, ids=lambda d: d.name)
def test_extremes_with_nan_equal_torch(backend: str, dtype: Any) -> None:
    given = [rows(c, n, dtype) for c, n in ((6, 3), (37, 67), (5, 128), (5, 3000))]
    inputs = [ark.tensor(list(v.shape), dtype) for v in given]
    outputs = [
        [f(x, axis=axis) for axis in (-1, 0) for f in (ark.argmax, ark.argmin)]
        + [ark.reduce_max(x, -1), ark.reduce_min(x, 0)]
        for x in inputs
    ]
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for x, v in zip(inputs, given, strict=True):
            x.from_numpy(v)
        runtime.run()
        for results, v in zip(outputs, given, strict=True):
            t = in_torch(v)
            wanted = (t.argmax(-1), t.argmin(-1), t.argmax(0), t.argmin(0), t.amax(-1), t.amin(0))
            for result, want in zip(results, wanted, strict=True):
                got = result.to_numpy().astype(np.float64).reshape(want.shape)
                np.testing.assert_array_equal(got, want.numpy().astype(np.float64))


@pytest.mark.parametrize("dtype", KINDS, ids=lambda d: d.name)
def test_topk_with_nan_equals_torch(backend: str, dtype: Any) -> None:
    """topk of rows with NaN equals the beginning of torch's stable sort: of equal elements the
    first one comes first.
    """
    shapes = ((6, 3, 3), (40, 130, 8), (5, 70, 70), (5, 4999, 4), (5, 4999, 80))
    given = [(rows(c, n, dtype), k) for c, n, k in shapes]
    inputs = [ark.tensor(list(v.shape), dtype) for v, _ in given]
    outputs = [
        [ark.topk(x, k, largest=largest) for largest in (True, False)]
        for x, (_, k) in zip(inputs, given, strict=True)
    ]
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for x, (v, _) in zip(inputs, given, strict=True):
            x.from_numpy(v)
        runtime.run()
        for results, (v, k) in zip(outputs, given, strict=True):
            for (values, places), largest in zip(results, (True, False), strict=True):
                want = torch.sort(in_torch(v), dim=-1, descending=largest, stable=True)
                at = want.indices[:, :k].numpy()
                np.testing.assert_array_equal(places.to_numpy(), at, err_msg=f"{v.shape} {k}")
                got = values.to_numpy().astype(np.float64)
                np.testing.assert_array_equal(got, np.take_along_axis(v, at, 1).astype(np.float64))


def test_topk_of_softmax_orders_equal_probabilities_by_index(backend: str) -> None:
    """A row's softmax may be equal for elements that differ: here it is 0 for most of them."""
    rng = np.random.default_rng(0)
    given = []
    for columns, k in ((7, 3), (32, 5), (128, 4), (256, 8)):
        v = rng.permutation(np.arange(5 * columns)).reshape(5, columns).astype(np.float32) / 8
        v[np.arange(5), rng.integers(0, columns, 5)] = 900.0
        v[1:3, ::3] = 900.0
        v[3, 0], v[4] = np.nan, -np.inf
        given.append((v, k))
    inputs = [ark.tensor(list(v.shape)) for v, _ in given]
    outputs = [ark.topk(ark.softmax(x), k) for x, (_, k) in zip(inputs, given, strict=True)]
    softmaxes = [ark.softmax(values) for values, _ in outputs]
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for x, (v, _) in zip(inputs, given, strict=True):
            x.from_numpy(v)
        runtime.run()
        for (values, places), result, (v, k) in zip(outputs, softmaxes, given, strict=True):
            want = torch.sort(torch.from_numpy(v).softmax(-1), descending=True, stable=True)
            np.testing.assert_array_equal(places.to_numpy(), want.indices[:, :k].numpy())
            largest = want.values[:, :k]
            np.testing.assert_allclose(values.to_numpy(), largest.numpy(), rtol=1e-6)
            np.testing.assert_allclose(result.to_numpy(), largest.softmax(-1), rtol=1e-6)
