"""Ops on random shapes, broadcasts, views and types, drawn by hypothesis, in a few models each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ark
from tests.opcheck import Case, check

FLOATS = st.sampled_from([ark.fp32, ark.fp16, ark.bf16])
SIZE = st.one_of(st.just(1), st.integers(1, 9), st.sampled_from([17, 33, 130]))
SHAPE = st.lists(SIZE, min_size=1, max_size=4).filter(lambda s: np.prod(s) <= 40000)


@st.composite
def broadcastable(draw: Any) -> tuple[list[int], list[int]]:
    """Draws two shapes that broadcast."""
    full = draw(SHAPE)

    def thinned() -> list[int]:
        kept = [n if draw(st.booleans()) else 1 for n in full]
        return kept[draw(st.integers(0, len(full) - 1)) :]

    return full, thinned()


@st.composite
def boxes(draw: Any) -> tuple[list[int], tuple[slice, ...]]:
    """Draws a shape and a box in it."""
    shape = draw(SHAPE)
    index = []
    for n in shape:
        begin = draw(st.integers(0, n - 1))
        index.append(slice(begin, draw(st.integers(begin + 1, n))))
    return shape, tuple(index)


@st.composite
def cases(draw: Any) -> list[Case]:
    """Draws a dozen calls."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    listed = []
    for name, reference in (("add", np.add), ("mul", np.multiply), ("sub", np.subtract)):
        left, right = draw(broadcastable())
        dtype = draw(FLOATS)
        inputs = [(rng.uniform(-1, 1, s), dtype) for s in (left, right)]
        op = getattr(ark, name)
        listed.append(Case(f"{name} {left} {right}", inputs, op, reference))
        listed.append(
            Case(
                f"swapped {name} {left} {right}",
                inputs[::-1],
                lambda a, b, op=op: op(a, b),
                reference,
            )
        )
    for name, reference in (("exp", np.exp), ("relu", lambda a: np.maximum(a, 0))):
        shape, box = draw(boxes())
        op = getattr(ark, name)
        listed.append(
            Case(
                f"{name} {shape} {box}",
                [(rng.uniform(-1, 1, shape), draw(FLOATS))],
                lambda t, op=op, box=box: op(t[box]),
                lambda a, r=reference, box=box: r(a[box]),
            )
        )
    shape = draw(SHAPE)
    perm = draw(st.permutations(range(len(shape))))
    listed.append(
        Case(
            f"transpose {shape} {perm}",
            [(rng.uniform(-1, 1, shape), draw(FLOATS))],
            lambda t: ark.transpose(t, perm),
            lambda a: a.transpose(perm),
        )
    )
    shape = draw(SHAPE)
    axis = draw(st.integers(0, len(shape) - 1))
    listed.append(
        Case(
            f"max {shape} {axis}",
            [(rng.uniform(-1, 1, shape), draw(FLOATS))],
            lambda t: ark.reduce_max(t, axis),
            lambda a: a.max(axis, keepdims=True),
        )
    )
    m, n, k = (draw(st.integers(1, 70)) for _ in range(3))
    listed.append(
        Case(
            f"matmul {m} {n} {k}",
            [(rng.uniform(-1, 1, (m, k)), ark.fp32), (rng.uniform(-1, 1, (n, k)), ark.fp32)],
            lambda a, b: ark.matmul(a, b, transpose_other=True),
            lambda a, b: a @ b.T,
            tolerance=1e-4,
        )
    )
    return listed


@given(drawn=cases())
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@pytest.mark.emulated("slow")
def test_any_shape(backend: str, drawn: list[Case]) -> None:
    ark.init(backend=backend)
    check(drawn)


def _windows(a: np.ndarray) -> np.ndarray:
    """Returns adjacent windows of 3 x 3 in the last dimension."""
    n, c, h, w = a.shape
    parts = a.reshape(n, c, h // 3, 3, w // 3, 3).swapaxes(3, 4)
    return parts.reshape(n, c, h // 3, w // 3, 9)


def test_nan_is_propagated(backend: str) -> None:
    """NaN is propagated as in NumPy and torch: by relu, by maxima and minima of two tensors and of
    dimensions, and by maxima of windows.
    """
    ark.init(backend=backend)
    rng = np.random.default_rng(7)
    listed = []
    for dtype in (ark.fp32, ark.bf16):
        rows, image = rng.uniform(-1, 1, (6, 300)), rng.uniform(-1, 1, (1, 2, 6, 9))
        for a in (rows, image):
            a.reshape(-1)[rng.integers(0, a.size, a.size // 20)] = np.nan
        listed.append(Case(f"relu {dtype}", [(rows, dtype)], ark.relu, lambda a: np.maximum(a, 0)))
        for axis in (0, 1):
            for op, reference in ((ark.reduce_max, np.max), (ark.reduce_min, np.min)):
                listed.append(
                    Case(
                        f"{op.__name__} {axis} {dtype}",
                        [(rows, dtype)],
                        lambda t, op=op, axis=axis: op(t, axis),
                        lambda a, r=reference, axis=axis: r(a, axis, keepdims=True),
                    )
                )
        listed.append(
            Case(
                f"max_pool {dtype}",
                [(image, dtype)],
                lambda t: ark.max_pool(t, 3),
                lambda a: _windows(a).max(-1),
            )
        )
    check(listed)
