"""Constants that are fused with the op that reads them keep their type."""

from __future__ import annotations

import ark


def test_constant_condition_is_a_bool() -> None:
    """A bool constant within a fused chain is a bool, so that `where` accepts it."""
    ark.init(backend="cpu")
    sides = ark.zeros([3, 6]), ark.constant(-1.0, [3, 6])
    kept = ark.where(ark.tril(ark.constant(1, [3, 6], ark.bool)), *sides)
    plan = ark.Planner(-1).plan().inner
    assert plan is not None and kept.shape() == [3, 6]
