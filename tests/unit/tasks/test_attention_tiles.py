"""How attention's tiles are assigned to processors: no processor has much more work
than the mean.
"""

from __future__ import annotations

import pytest

from ark.backend import registry
from ark.cli.measure.cases import attention
from ark.cli.measure.ops import planned
from ark.plan.kind import signature
from ark.tasks.attention_tiles import tiles


@pytest.mark.parametrize(
    ("heads", "width", "rows", "most"),
    [(16, 128, 8192, 1.01), (16, 128, 4096, 1.03), (16, 64, 8192, 1.01), (8, 256, 8192, 1.01)],
)
def test_fullest_processor_has_little_more_keys_than_the_mean(
    heads: int, width: int, rows: int, most: float
) -> None:
    plan, _ = planned(attention(heads, width, rows), registry.machine("h100"))
    op = next(op for op in plan.ops if op.kind == "attention_tiles")
    sig, tasks = signature(plan, op), op.params["tasks"]
    dealt = [tiles(sig, (task,)) for task in range(tasks)]
    assert sorted(tile for task in dealt for tile in task) == [
        (0, head, row) for head in range(heads) for row in range(0, rows, 128)
    ]
    keys = [sum(row + 128 for _, _, row in task) for task in dealt]
    assert max(keys) <= most * sum(keys) / tasks
