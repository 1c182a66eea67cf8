"""Gradients of random convolutions and max pools equal torch.autograd: strides, paddings, groups,
dilations, one to three spatial dimensions, and the gradient of a gradient.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import ark
from tests.gradcheck import Case, check, values

torch = pytest.importorskip("torch")
F = torch.nn.functional
CASE_COUNT = 8


def _sizes(draw: random.Random, count: int, low: int, high: int) -> list[int]:
    return [draw.randint(low, high) for _ in range(count)]


def _convolution(seed: int) -> Case:
    """A random convolution. Kernels of single pixels are frequent, because they have a form of
    their own.
    """
    draw = random.Random(seed)
    count, groups = draw.choice((1, 2, 2, 2, 3)), draw.choice((1, 1, 2, 3))
    channels, outputs = (groups * draw.randint(1, 3) for _ in range(2))
    kernel = [1] * count if draw.random() < 0.3 else _sizes(draw, count, 1, 3)
    steps, spread = _sizes(draw, count, 1, 3), _sizes(draw, count, 1, 2)
    pads = _sizes(draw, count, 0, 2)
    least = [max(1, (k - 1) * d + 1 - 2 * p) for k, d, p in zip(kernel, spread, pads, strict=True)]
    spatial = [draw.randint(n, n + 5) for n in least]
    operands = [
        values(draw.randint(1, 3), channels, *spatial, seed=seed),
        values(outputs, channels // groups, *kernel, seed=seed + 1),
        values(outputs, seed=seed + 2),
    ]
    convolved = (F.conv1d, F.conv2d, F.conv3d)[count - 1]
    return Case(
        f"conv {seed}: {kernel} of {spatial}, {steps} {pads} {spread}, {groups} groups",
        operands,
        lambda x, w, b: ark.conv(x, w, b, steps, pads, spread, groups),
        lambda x, w, b: convolved(x, w, b, steps, pads, spread, groups),
    )


def _pool(seed: int) -> Case:
    draw = random.Random(seed)
    count = draw.choice((1, 2, 2, 3))
    kernel, steps = _sizes(draw, count, 1, 3), _sizes(draw, count, 1, 3)
    spread = _sizes(draw, count, 1, 2)
    pads = [draw.randint(0, k // 2) for k in kernel]
    least = [max(1, (k - 1) * d + 1 - 2 * p) for k, d, p in zip(kernel, spread, pads, strict=True)]
    spatial = [draw.randint(n, n + 4) for n in least]
    tied = draw.random() < 0.5
    image = values(2, 3, *spatial, seed=seed)
    pooled = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[count - 1]
    return Case(
        f"max_pool {seed}: {kernel} of {spatial}, {steps} {pads} {spread}",
        [np.round(image) if tied else image],
        lambda x: ark.max_pool(x, kernel, steps, pads, spread),
        lambda x: pooled(x, kernel, steps, pads, spread),
        smooth=not tied,
    )


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[] if s == 0 else pytest.mark.emulated("slow")) for s in (0, 1)]
)
def test_random_convolutions(backend: str, seed: int) -> None:
    check([_convolution(100 * seed + i) for i in range(CASE_COUNT)])


def test_random_max_pools(backend: str) -> None:
    check([_pool(i) for i in range(CASE_COUNT)])


@pytest.mark.parametrize(
    ("size", "stride", "pad"),
    [((3, 3), (2, 2), (1, 1)), ((2, 3), (2, 1), (0, 1)), ((5, 2), (2, 3), (2, 0))],
    ids=["usual", "without overlap", "gaps"],
)
def test_max_pools_with_channels_last(
    backend: str, size: tuple[int, int], stride: tuple[int, int], pad: tuple[int, int]
) -> None:
    """Blocks of pixels that read the same windows."""
    image = values(1, 2, 10, 12, 8, seed=5)

    def pooled(x: Any) -> Any:
        return ark.max_pool(x, [*size, 1], [*stride, 1], [*pad, 0])

    def wanted(x: Any) -> Any:
        return F.max_pool3d(x, (*size, 1), (*stride, 1), (*pad, 0))

    check([Case(f"{size} {stride} {pad}", [image], pooled, wanted)])


def test_gradient_of_a_gradient_of_a_max_pool(backend: str) -> None:
    def twice(x: Any) -> Any:
        pooled = ark.max_pool(ark.mul(x, x), 3, 2, 1)
        total = ark.reduce_sum(ark.reshape(ark.mul(pooled, pooled), [-1]), 0)
        return ark.grad(total, x)

    def wanted(x: Any) -> Any:
        total = (F.max_pool2d(x * x, 3, 2, 1) ** 2).sum()
        (gradient,) = torch.autograd.grad(total, x, create_graph=True)
        return gradient

    check([Case("max_pool twice", [values(2, 3, 7, 6, seed=4)], twice, wanted)])
