"""Finds the measured size that is nearest to a given size. Called by ark.lower.engines and
ark.runtime.tuned_collectives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MAX_SIZE_RATIO = 2.0  # a size may use the choice of a measured size within this ratio


def nearest(sizes: Sequence[int], nbytes: int) -> int | None:
    """The index of the size nearest to this number of bytes. None if no size is near enough."""
    near = [
        i
        for i, n in enumerate(sizes)
        if nbytes <= MAX_SIZE_RATIO * n and n <= MAX_SIZE_RATIO * nbytes
    ]
    return min(near, key=lambda i: abs(math.log(sizes[i] / nbytes)), default=None)
