"""Copies of images with channels last to channels first, once for each column of a window, on every
backend, compared with NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import ark
from ark.ops.indexing import remap, same
from tests.opcheck import Case, check


def planes(
    image: tuple[int, int, int, int],
    columns: int = 3,
    dilation: int = 1,
    before: int = 1,
    stride: int = 1,
    pitch: int = 0,
    dtype: Any = ark.fp32,
) -> Case:
    """Column i of a window of element (y, x) is at x * stride + i * dilation - before. Rows have
    `pitch` elements; by default as many as the image.
    """
    n, high, wide, channels = image
    pitch = pitch or wide
    rules: list[Any] = [same(2), same(3), [[[4, stride], [0, dilation]], -before, 1, "fill"]]
    shape = [columns, channels, n, high, pitch]
    values = np.random.default_rng(wide * channels).uniform(-1, 1, image)

    def expected(x: np.ndarray) -> np.ndarray:
        at = np.arange(pitch) * stride + np.arange(columns)[:, None] * dilation - before
        inside = (at >= 0) & (at < wide)
        taken = x[:, :, at.clip(0, wide - 1)] * inside[:, :, None]  # n, high, columns, pitch, c
        return taken.transpose(2, 4, 0, 1, 3)

    return Case(
        f"{image} {columns} {dilation} {before} {stride} {pitch} {dtype}",
        [(values, dtype)],
        lambda x: remap("planes", x, shape, [*rules, same(1)]),
        expected,
    )


def test_planes_of_images(backend: str) -> None:
    """Rows that end with zeros, tiles with parts of the channels or rows, one column, strides
    and vectors of other lengths.
    """
    check(
        [
            planes((2, 5, 7, 32), pitch=8),
            planes((2, 40, 12, 64), dilation=2, before=2),
            planes((1, 3, 4, 192), columns=1, before=0),
            planes((1, 3, 5, 96), columns=2),
            planes((2, 6, 9, 16), stride=2, pitch=5),
            planes((2, 30, 14, 64), pitch=16, dtype=ark.bf16),
            planes((3, 4, 6, 40), columns=5, before=2, dtype=ark.fp16),
            planes((40, 4, 6, 128), columns=5),
        ]
    )
