"""Which of the sizes that were measured stands for another. Called by ark.lower.engines and
ark.runtime.tuned_collectives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NEAR = 2.0  # a choice serves sizes up to so many times larger or smaller than what was measured


def nearest(sizes: Sequence[int], nbytes: int) -> int | None:
    """The place of the size nearest to so many bytes; None if none is near."""
    near = [i for i, n in enumerate(sizes) if nbytes <= NEAR * n and n <= NEAR * nbytes]
    return min(near, key=lambda i: abs(math.log(sizes[i] / nbytes)), default=None)
