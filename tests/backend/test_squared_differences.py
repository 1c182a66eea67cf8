"""Sums of squared differences from the mean, and their gradient, beside torch's variance."""

from __future__ import annotations

from ark.ops.reductions import squared_differences
from tests.gradcheck import Case, check, values


def test_gradients_are_those_of_the_variance(backend: str) -> None:
    check(
        [
            Case(
                f"axis {axis}",
                [values(3, 4, 5, seed=2)],
                lambda x, axis=axis: squared_differences(x, [axis]),
                lambda x, axis=axis: x.var(axis, correction=0, keepdim=True) * x.shape[axis],
            )
            for axis in (1, 2)
        ]
    )
