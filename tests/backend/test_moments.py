"""Means of columns and sums of squared differences from them, which GPUs compute in one op."""

from __future__ import annotations

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.lower.ops import reductions
from ark.lower.pipeline import plan

SHAPES = ((9000, 64), (70, 260), (5000, 24), (37, 5))


def statistics(x: ark.Tensor) -> ark.Tensor:
    """The means of the columns, and their variances times the number of rows."""
    mean = ark.reduce_mean(x, 0)
    apart = ark.sub(x, mean)
    return ark.concat([mean, ark.reduce_sum(ark.mul(apart, apart), 0)], 0)


@pytest.fixture(autouse=True)
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divides long columns into parts, although few processors could reduce a few columns each."""
    monkeypatch.setattr(reductions, "_narrow", lambda *_: 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics_of_columns_far_from_zero_equal_numpys(
    backend: str, shape: tuple[int, int]
) -> None:
    rng = np.random.default_rng(shape[0])
    far = 100 * rng.standard_normal(shape[1])
    data = (rng.standard_normal(shape) + far).astype(np.float32)
    ark.init(backend=backend)
    x = ark.tensor(shape)
    result = statistics(x)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(data)
        runtime.run()
        mean, squares = result.to_numpy()
    wide = data.astype(np.float64)
    np.testing.assert_allclose(mean, wide.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(squares, shape[0] * wide.var(0), rtol=1e-4)


def sums(x: ark.Tensor, y: ark.Tensor) -> ark.Tensor:
    """The sums of the columns of y, and of their products with x less its first row."""
    total = ark.reduce_sum(y, 0)
    return ark.concat([total, ark.reduce_sum(ark.mul(ark.sub(x, x[0:1]), y), 0)], 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_sums_of_columns_equal_numpys(backend: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(shape[0])
    data = rng.uniform(1, 2, (2, *shape)).astype(np.float32)
    ark.init(backend=backend)
    x, y = ark.tensor(shape), ark.tensor(shape)
    result = sums(x, y)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(data[0])
        y.from_numpy(data[1])
        runtime.run()
        first, second = result.to_numpy()
    wide, other = data.astype(np.float64)
    np.testing.assert_allclose(first, other.sum(0), rtol=1e-5)
    np.testing.assert_allclose(second, ((wide - wide[0]) * other).sum(0), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("machine", ["h200", "mi300x"])
def test_moments_on_a_gpu_read_the_elements_once(machine: str) -> None:
    with ark.use_model(ark.Model()) as model:
        x = ark.tensor(SHAPES[0], name="x")
        statistics(x)
    planned = plan(model.graph, registry.machine(machine))
    readers = [op for op in planned.ops if planned.tensors[op.operands[0]].buffer == 0]
    assert [op.params["function"] for op in readers] == ["moments"]


@pytest.mark.parametrize("machine", ["h200", "mi300x"])
def test_two_sums_on_a_gpu_read_their_columns_once(machine: str) -> None:
    with ark.use_model(ark.Model()) as model:
        x, y = ark.tensor(SHAPES[0], name="x"), ark.tensor(SHAPES[0], name="y")
        sums(x, y)
    planned = plan(model.graph, registry.machine(machine))
    functions = [op.params["function"] for op in planned.ops if op.kind == "reduce"]
    assert functions == ["sums", "first_sum", "second_sum"]


def test_squares_of_other_differences_are_not_joined() -> None:
    with ark.use_model(ark.Model()) as model:
        x, y = ark.tensor(SHAPES[0]), ark.tensor(SHAPES[0])
        apart = ark.sub(y, ark.reduce_mean(x, 0))
        ark.reduce_sum(ark.mul(apart, apart), 0)
    planned = plan(model.graph, registry.machine("h200"))
    assert "moments" not in [op.params.get("function") for op in planned.ops]


def test_sum_of_terms_that_need_the_other_sum_is_computed_behind_it() -> None:
    with ark.use_model(ark.Model()) as model:
        x = ark.tensor(SHAPES[0])
        apart = ark.sub(x, ark.reduce_sum(x, 0))
        ark.reduce_sum(ark.mul(apart, apart), 0)
    planned = plan(model.graph, registry.machine("h200"))
    assert "sums" not in [op.params.get("function") for op in planned.ops]
