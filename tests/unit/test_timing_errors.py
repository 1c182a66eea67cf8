"""The pages of predicted and published times on AMD GPUs, and of planted defects, are generated
from files of figures. A file with a missing or invalid figure is refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.ci import load

timing_errors, defect_counts = load("timing_errors"), load("defect_counts")


@pytest.mark.parametrize(
    ("least", "most", "predicted", "error"),
    [(4, 4, 5, 0.25), (4, 4, 3, -0.25), (3, 8, 4, 0), (3, 8, 1.5, -0.5), (3, 8, 10, 0.25)],
)
def test_error_is_relative_to_the_nearest_published_figure(
    least: float, most: float, predicted: float, error: float
) -> None:
    row = timing_errors.Published("key", "subject", "us", least, most, "source")
    assert row.error(predicted) == pytest.approx(error)


def test_goals_are_reached_or_not() -> None:
    predicted = timing_errors.read().predicted
    for goal in timing_errors.GOALS:
        for factor, word in ((1.0, "yes"), (1.01, "no")):
            page = timing_errors.table({**predicted, goal.key: goal.most * factor})
            (row,) = (line for line in page.splitlines() if line.startswith(f"| {goal.subject} |"))
            assert row.endswith(f"| {word} |")


def test_missing_prediction_is_named() -> None:
    predicted = dict(timing_errors.read().predicted)
    del predicted["barrier"]
    with pytest.raises(ValueError, match=r"lacks \['barrier'\]; run"):
        timing_errors.table(predicted)


@pytest.mark.parametrize("text", ["{", '{"predicted": {"near": "642"}}', '{"forecast": {}}'])
def test_file_of_predictions_is_checked(text: str, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(text)
    with pytest.raises(ValueError, match=r"some\.json is not a file of predictions"):
        timing_errors.read(tmp_path / "some.json")


def test_missed_defects_and_false_alarms_are_named(tmp_path: Path) -> None:
    counts = defect_counts.Counts(60, ["message-no_wait"], 3, 40, ["spin_lock"], [])
    page = defect_counts.table({"gfx942": counts})
    assert "| gfx942 | 60 | 59 | 40 | 3 | 1 | 0 |" in page
    assert "gfx942 missed: message-no_wait." in page and "gfx942 accused: spin_lock." in page
    (tmp_path / "some.json").write_text('{"gfx942": {"defects": 60}}')
    with pytest.raises(ValueError, match=r"some\.json is not a file of counts"):
        defect_counts.read(tmp_path / "some.json")


def test_all_planted_defects_are_found_without_false_alarms() -> None:
    counts = defect_counts.read()
    assert list(counts) == ["gfx90a", "gfx942", "gfx950", "gfx1100"]
    for c in counts.values():
        assert c.defects >= 60 and c.sound >= 40
        assert c.missed == c.accused == c.linted == []
