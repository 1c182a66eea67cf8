"""The sizes of tiles are chosen so that few processors are idle while the last tasks of an
op run.
"""

from __future__ import annotations

import math

import pytest

from ark.backend import registry
from ark.ir.fold import fold
from ark.lower.tiling import box_tile

H200 = registry.get("cuda").machine("h200")
# The ops: (shape of the result, operations for an element). They are sums of 64x257x1000 over two
# dimensions, and batch norms.
CASES = [((64, 257, 1), 1000), ((64, 1, 1000), 257), ((16, 64, 56, 56), 1), ((16, 64, 57, 57), 1)]


@pytest.mark.parametrize(("shape", "weight"), CASES)
def test_last_round_is_as_full_as_the_others(shape: tuple[int, ...], weight: int) -> None:
    tile = box_tile(shape, H200, weight)
    tasks = math.prod(-(-n // t) for n, t in zip(fold(shape), tile, strict=True))
    rounds = -(-tasks // H200.processors)
    assert tasks >= 0.9 * rounds * H200.processors, (tile, tasks)


def test_with_many_rounds_the_tile_with_the_best_memory_rate_is_kept() -> None:
    assert math.prod(box_tile((1 << 26,), H200)) == 16384
