"""Transposes that products read through views, also in another shape."""

from __future__ import annotations

import numpy as np
import pytest

import ark
from ark.backend.registry import machine
from ark.frontend.model import Model, use_model
from ark.frontend.tensor import Tensor
from ark.lower.pipeline import plan

LEFT, RIGHT = [6, 5, 4], [2, 3, 1, 7, 4]


def _product(perm: list[int], rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The product of 6 matrices of 5 x 4 with matrices that are a transpose in another shape."""
    left, right = ark.tensor(LEFT), ark.tensor(RIGHT)
    turned = ark.reshape(ark.transpose(ark.relu(right), perm), rows)
    return left, right, ark.matmul(left, turned)


@pytest.mark.parametrize(
    ("perm", "kinds"),
    [
        ([0, 1, 4, 3, 2], ["elementwise", "matmul"]),
        ([0, 1, 2, 4, 3], ["elementwise", "matmul"]),
        ([1, 0, 4, 3, 2], ["elementwise", "transpose", "matmul"]),
    ],
)
def test_transpose_is_read_in_another_shape(perm: list[int], kinds: list[str]) -> None:
    model = Model()
    with use_model(model):
        _product(perm, [6, 4, 7])
    assert [op.kind for op in plan(model.graph, machine("cpu-2")).ops] == kinds


def test_products_are_right() -> None:
    ark.init(backend="cpu")
    left, right, out = _product([0, 1, 4, 3, 2], [6, 4, 7])
    draw = np.random.default_rng(0).standard_normal
    a, b = draw(LEFT).astype(np.float32), draw(RIGHT).astype(np.float32)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        left.from_numpy(a)
        right.from_numpy(b)
        runtime.run()
        expected = a @ np.maximum(b, 0).reshape(6, 7, 4).swapaxes(1, 2)
        np.testing.assert_allclose(out.to_numpy(), expected, rtol=1e-5, atol=1e-5)
