"""Which reads the verifier proves from the bytes of a write, and which it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan
from ark.plan.access import Region
from ark.plan.boxes import Boxes
from ark.plan.types import PlanBuffer
from ark.plan.verify import reads, verify

ROWS, COLUMNS, ITEM_BYTES = 8, 4, 4
MATRIX, FLAT = (ROWS, COLUMNS), (ROWS * COLUMNS,)


def _region(
    frame: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]], write: bool
) -> Region:
    """The accesses of one task per box, from first indices to the indices after the last ones."""
    lo, hi = (np.array([box[side] for box in boxes]) for side in (0, 1))
    pitch = np.array([int(np.prod(frame[d + 1 :])) for d in range(len(frame))])
    begin = lo @ pitch * ITEM_BYTES
    end = ((hi - 1) @ pitch + 1) * ITEM_BYTES
    count = np.arange(len(boxes))
    accessed = Boxes(0, write, False, (0, 0), False, ITEM_BYTES, count, count, lo, hi, begin, end)
    return Region(0, accessed, 0, 0, tuple(frame), (0,) * len(frame), 0, False)


def _rows(first: int, last: int, columns: int = COLUMNS) -> list[tuple[list[int], list[int]]]:
    return [([row, 0], [row + 1, columns]) for row in range(first, last)]


@pytest.mark.parametrize(
    ("written", "count", "painted"),
    [
        (_rows(0, ROWS), ROWS * COLUMNS, False),
        (_rows(0, ROWS - 1), (ROWS - 1) * COLUMNS, False),
        (_rows(0, ROWS - 1), (ROWS - 1) * COLUMNS + 1, True),
        (_rows(1, ROWS), COLUMNS, True),
        (_rows(0, ROWS, COLUMNS - 1), COLUMNS - 1, True),  # with gaps, so its bytes prove nothing
    ],
)
def test_read_by_other_indices(written: Any, count: int, painted: bool, monkeypatch: Any) -> None:
    """After boxes of a matrix were `written`, its first `count` elements are read as a flat range.
    painted: True if the verifier must mark each written element to decide this read.
    """
    calls: list[Region] = []
    slices = reads._slices

    def counted(region: Region) -> Any:
        calls.append(region)
        return slices(region)

    monkeypatch.setattr(reads, "_slices", counted)
    buffer = PlanBuffer(0, "x", "activation", ROWS * COLUMNS * ITEM_BYTES)
    known = reads._Written(buffer, ITEM_BYTES)
    known.writes.append(_region(MATRIX, written, True))
    lacking = known.lacks(_region(FLAT, [([0], [count])], False))
    bytes_of_rows = {row * COLUMNS + c for (row, _), (_, end) in written for c in range(end)}
    assert len(lacking) == (not set(range(count)) <= bytes_of_rows)
    assert bool(calls) == painted


def test_reshaped_values_need_no_painting(monkeypatch: Any) -> None:
    model = Model()
    with use_model(model):
        values = ark.softmax(ark.tensor([64, 96], name="x"))
        ark.softmax(ark.reshape(values, [128, 48]))
    planned = plan(model.graph, registry.machine("h200"), {})
    monkeypatch.setattr(reads, "_slices", lambda region: pytest.fail("painted"))
    verify([planned])
