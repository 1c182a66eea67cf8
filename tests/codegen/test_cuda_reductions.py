"""CUDA's device code of reductions, scans and softmax, executed on the CPU with a host thread for
each thread of a block, and compared with NumPy. The cases differ in which threads share a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ark_cuda")

from ark_cuda import machines

import ark
from ark.frontend.model import Model, use_model
from ark.frontend.tensor import Tensor
from ark.lower.pipeline import plan
from ark.ops.reductions import squared_differences
from ark.ops.scans import recurrence, sums_from
from tests.block_on_host import Block

FEW_PROCESSORS = 4
RANDOM = np.random.default_rng(7)


def computed(build: Callable[..., Tensor], folder: Path, *given: np.ndarray) -> np.ndarray:
    """The result of `build` for the given fp32 arrays, in the shape of its last op."""
    model = Model(0, 1)
    with use_model(model):
        inputs = [ark.tensor(list(a.shape), name=f"in{i}") for i, a in enumerate(given)]
        kept = build(*inputs)
    planned = plan(model.graph, machines.MODELS["h200"].with_processors(FEW_PROCESSORS), {})
    block = Block(planned, folder)
    for i, array in enumerate(given):
        view = block.named(f"in{i}")
        view[...] = array.reshape(view.shape)
    for op in planned.ops:
        block.run(op)
    assert kept
    return np.array(block.operand(planned.ops[-1], len(planned.ops[-1].operands) - 1))


def whole(shape: Sequence[int]) -> np.ndarray:
    """Small integers, whose sums are exact."""
    return RANDOM.integers(-4, 5, size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((33, 1000), 1),  # teams of several warps
        ((300, 49), 1),  # some lanes of a warp, each with several elements
        ((20, 4097), 1),  # single elements, many in flight
        ((16, 4000), 0),  # threads reduce columns alone
        ((257, 130), 0),  # the last loads of a column are not all there
        ((2048, 40), 0),  # tasks of few whole columns, whose parts lanes exchange
        ((4099, 9), 0),  # as before; the last tile has one column
    ],
)
def test_sums(shape: tuple[int, ...], axis: int, tmp_path: Path) -> None:
    array = whole(shape)
    total = computed(lambda x: ark.reduce_sum(x, axis), tmp_path, array)
    np.testing.assert_array_equal(total.reshape(-1), array.sum(axis))


@pytest.mark.parametrize(("shape", "axis"), [((33, 1000), 1), ((1, 70000), 1), ((16, 4000), 0)])
def test_squared_differences(shape: tuple[int, ...], axis: int, tmp_path: Path) -> None:
    array = RANDOM.normal(50.0, 1.0, shape).astype(np.float32)
    result = computed(lambda x: squared_differences(x, [axis]), tmp_path, array)  # type: ignore[arg-type,return-value]
    expected = array.astype(np.float64).var(axis) * shape[axis]
    np.testing.assert_allclose(result.reshape(-1), expected, rtol=2e-5)


@pytest.mark.parametrize("last", [False, True])
def test_indices_of_the_smallest(last: bool, tmp_path: Path) -> None:
    array = whole((40, 300))
    array[:, 7], array[:, 9] = 0.0, -0.0
    array[5, 20] = array[9, 20] = np.nan
    places = computed(lambda x: ark.argmin(x, axis=0, last=last), tmp_path, array)
    expected = np.argmin(array[::-1] if last else array, axis=0)
    np.testing.assert_array_equal(places.reshape(-1), 39 - expected if last else expected)


@pytest.mark.parametrize("shape", [(16, 8192), (40, 333), (300, 64)])
def test_sums_from_a_start(shape: tuple[int, ...], tmp_path: Path) -> None:
    array, start = whole(shape), whole((shape[0], 1))
    sums: Any = computed(lambda x, s: sums_from(x, 1, s), tmp_path, array, start)
    np.testing.assert_array_equal(sums.reshape(shape), start + np.cumsum(array, 1))


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((256, 2, 48), 0),  # a team of warps for each 32 lines
        ((40, 3, 48), 0),  # a thread for each line
        ((5, 300), 1),  # lanes along a line, packs of four elements
        ((2, 301), 1),
    ],
)
def test_linear_recurrences(shape: tuple[int, ...], axis: int, tmp_path: Path) -> None:
    factors = RANDOM.uniform(0.2, 1.0, shape).astype(np.float32)
    terms = RANDOM.normal(size=shape).astype(np.float32)
    values = computed(lambda f, t: recurrence(f, t, axis), tmp_path, factors, terms)
    total, expected = np.zeros(1), []
    steps = (np.moveaxis(operand, axis, 0) for operand in (factors, terms))
    for factor, term in zip(*steps, strict=True):
        total = factor.astype(np.float64) * total + term
        expected.append(total)
    np.testing.assert_allclose(values.reshape(shape), np.stack(expected, axis), 1e-5, 1e-5)


def test_exclusive_sums_from_the_end(tmp_path: Path) -> None:
    array = whole((8, 4096))
    sums = computed(lambda x: ark.cumsum(x, 1, True, True), tmp_path, array)
    expected = np.flip(np.cumsum(np.flip(array, 1), 1), 1) - array
    np.testing.assert_array_equal(sums.reshape(array.shape), expected)


def test_softmax_of_short_odd_rows(tmp_path: Path) -> None:
    array = whole((300, 33))
    result = computed(ark.softmax, tmp_path, array)
    powers = np.exp(array - array.max(1, keepdims=True))
    np.testing.assert_allclose(
        result.reshape(array.shape), powers / powers.sum(1, keepdims=True), 1e-5
    )


@pytest.mark.parametrize("columns", [4096, 5000])
def test_sums_of_exponentials(columns: int, tmp_path: Path) -> None:
    """Rows that end within the elements that threads add at once, infinite elements and NaN."""
    array = (4 * RANDOM.standard_normal((9, columns))).astype(np.float32)
    array[1, 5:], array[2, 1::2], array[3] = -np.inf, -np.inf, 30 * array[3]
    array[4, 7], array[5, 9], array[6] = np.inf, np.nan, -np.inf

    def build(x: Tensor, first: Tensor) -> Tensor:
        return ark.gather_elements(ark.log_softmax(x), ark.cast(first, ark.int32), 1)

    with np.errstate(invalid="ignore"):
        shifted = array.astype(np.float64) - array.max(1, keepdims=True)
        want = (shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))[:, :1]
    first = np.zeros(want.shape, np.float32)
    got = computed(build, tmp_path, array, first).reshape(want.shape)
    fine = np.isfinite(want)
    assert fine.sum() == 6
    assert not np.isfinite(got[~fine]).any()
    np.testing.assert_allclose(got[fine], want[fine], rtol=1e-6, atol=1e-5)
