"""Finds the nearest measured size for another one. Called by ark.lower.engines and
ark.runtime.tuned_collectives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MAX_SIZE_RATIO = 2.0  # the largest ratio between a size and the measured one whose choice it takes


def nearest(sizes: Sequence[int], nbytes: int) -> int | None:
    """The index of the size nearest to this number of bytes; None if none is near."""
    near = [
        i
        for i, n in enumerate(sizes)
        if nbytes <= MAX_SIZE_RATIO * n and n <= MAX_SIZE_RATIO * nbytes
    ]
    return min(near, key=lambda i: abs(math.log(sizes[i] / nbytes)), default=None)
