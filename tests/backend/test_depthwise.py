"""Depthwise convolutions (each channel alone) and convolutions in groups of few channels, on every
backend, compared with torch in fp64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ark
from tests.opcheck import Case, check

torch = pytest.importorskip("torch")


def depthwise(
    x: tuple[int, ...],
    outputs: int,
    kernel: tuple[int, int],
    dtype: Any = ark.fp32,
    groups: int = 0,
    then: bool = False,
    **form: Any,
) -> Case:
    """Returns a test case of a convolution. groups: 0 for one group per channel."""
    many = groups or x[1]
    rng = np.random.default_rng(outputs + kernel[0])
    image = rng.uniform(-1, 1, x)
    weight = rng.uniform(-1, 1, (outputs, x[1] // many, *kernel))

    def build(source: Any, table: Any) -> Any:
        convolved = ark.conv(source, table, groups=many, **form)
        return ark.relu(convolved) if then else convolved

    def expected(source: np.ndarray, table: np.ndarray) -> np.ndarray:
        given = (torch.tensor(v, dtype=torch.float64) for v in (source, table))
        convolved = torch.nn.functional.conv2d(*given, groups=many, **form).numpy()
        return np.maximum(convolved, 0) if then else convolved

    name = f"{x} {outputs} {kernel} {dtype} {groups} {form}"
    return Case(name, [(image, dtype), (weight, dtype)], build, expected)


def test_each_channel_by_itself(backend: str) -> None:
    """Depthwise convolutions of one channel per group: strides, dilations and padding of many
    sizes, and rows that do not divide evenly among threads.
    """
    check(
        [
            depthwise((2, 70, 13, 37), 70, (3, 3), padding=1, then=True),
            depthwise((1, 24, 21, 40), 24, (3, 3), ark.bf16, padding=1, stride=2),
            depthwise((1, 40, 30, 19), 40, (5, 5), padding=(4, 2), dilation=(2, 1)),
            depthwise((1, 16, 29, 33), 16, (7, 7), ark.fp16, padding=3),
            depthwise((1, 12, 40, 50), 12, (2, 3), stride=(3, 1)),
        ]
    )


def test_plane_of_several_tasks(backend: str) -> None:
    check([depthwise((1, 3, 231, 111), 3, (3, 3), padding=1)])


def test_groups_of_channels_with_one_result(backend: str) -> None:
    check(
        [
            depthwise((2, 64, 17, 33), 16, (3, 3), groups=16, padding=1),
            depthwise((2, 32, 17, 33), 64, (3, 3), groups=32, padding=1),  # 2 results each
        ]
    )
