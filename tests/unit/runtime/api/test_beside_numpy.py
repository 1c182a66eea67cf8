"""Tensors in expressions with NumPy arrays: no result is silently built element by element."""

from __future__ import annotations

import operator

import numpy as np
import pytest

import ark


def test_array_beside_a_tensor_is_refused_at_once() -> None:
    t = ark.tensor([4, 4])
    ones = np.ones((4, 4), np.float32)
    for apply in (operator.add, operator.mul, operator.matmul, operator.lt, operator.pow):
        for left, right in ((ones, t), (t, ones)):
            with pytest.raises((ark.InvalidUsageError, TypeError)):
                apply(left, right)
    with pytest.raises(TypeError):
        np.exp(t)
    assert not t.model.graph.nodes
    for number in (np.float32(2), np.int64(2), np.float64(2)):
        assert (number * t).shape() == ark.mul(t, number).shape() == [4, 4]
    attributes = {str(node.attrs) for node in t.model.graph.nodes}
    assert len(t.model.graph.nodes) == 6 and attributes == {"{'scalar': 2.0}"}


def test_loop_over_a_tensor_gives_its_rows_and_ends() -> None:
    t = ark.tensor([3, 4])
    assert [row.shape() for row in t] == [[1, 4]] * 3
    assert sum(t, ark.tensor([1, 4])).shape() == [1, 4]
    for function in (ark.concat, ark.reshape):
        with pytest.raises(ark.InvalidUsageError):
            function(t, t)


def test_contents() -> None:
    import torch

    t = ark.tensor([2, 2])
    with pytest.raises(ark.InvalidUsageError, match="no memory yet"):
        np.asarray(t)
    doubled = ark.mul(t, 2.0)
    with ark.Runtime() as runtime:
        runtime.launch()
        for bad in (np.ones((2, 2), complex), np.full((2, 2), "a"), np.full((2, 2), None)):
            with pytest.raises(ark.InvalidUsageError, match="real numbers"):
                t.from_numpy(bad)
        t.from_numpy(torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)))  # type: ignore[arg-type]
        runtime.run()
        np.testing.assert_array_equal(doubled, np.full((2, 2), 2.0))  # type: ignore[arg-type]
        assert np.asarray(doubled, np.int64).dtype == np.int64
        with pytest.raises(ValueError, match="without a copy"):
            np.array(doubled, copy=False)
