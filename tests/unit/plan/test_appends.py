"""Tasks of one op that append to one cache must write different rows, or the verifier refuses the
plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from ark.errors import PlanError
from ark.plan import kind as kinds
from ark.plan.kind import ALL_ROWS
from ark.plan.verify import verify
from tests.projection import Projection, with_matrix
from tests.unit.plan.shapes import machine

PROJECTION = Projection(rows=200, k=16, heads=1, kv_heads=1, width=64, context=256)


def test_tiles_append_the_rows_that_they_have() -> None:
    plan = PROJECTION.plan(with_matrix(machine(4)))
    (op,) = plan.ops
    kind, sig = kinds.get("matmul"), kinds.signature(plan, op)
    height = op.params["tile"][0]
    tasks = [task for own in plan.phases[0].processors for task in own]
    ranges = {a.appended for t in tasks for a in kind.accesses(sig, t.coord) if a.append_only}
    assert ranges == {(first, min(first + height, 200)) for first in range(0, 200, height)}
    assert len(ranges) > 1


@pytest.mark.parametrize("rows", [ALL_ROWS, (0, 1)])
def test_tasks_that_may_append_the_same_rows_are_refused(
    rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PROJECTION.plan(with_matrix(machine(4)))
    kind, true = kinds.get("matmul"), kinds.get("matmul").accesses

    def same(sig: kinds.Signature, coord: Sequence[int]) -> list[kinds.Access]:
        return [
            dataclasses.replace(a, appended=rows) if a.append_only else a for a in true(sig, coord)
        ]

    monkeypatch.setattr(kind, "accesses", same)
    with pytest.raises(PlanError, match="product"):
        verify([plan])
