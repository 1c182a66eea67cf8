"""Copies of images (n, h, w, c): cyclic shifts, and the division into windows of rows and columns.
Called by tests of ark.lower.rewrite.
"""

from __future__ import annotations

from typing import Any

import ark
from ark.ops.indexing import remap


def roll(x: Any, *shifts: int) -> Any:
    shape = x.shape()
    rules = [[[[d, 1]], shifts[d] % n, 1, "wrap"] for d, n in enumerate(shape)]
    return remap("roll", x, shape, rules)


def windows(x: Any, high: int, wide: int) -> Any:
    n, h, w, c = x.shape()
    split = ark.reshape(x, [n, h // high, high, w // wide, wide, c])
    return ark.transpose(split, [0, 1, 3, 2, 4, 5])


def image(x: Any) -> Any:
    n, i, j, high, wide, c = x.shape()
    return ark.reshape(ark.transpose(x, [0, 1, 3, 2, 4, 5]), [n, i * high, j * wide, c])
