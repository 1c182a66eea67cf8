"""The generated CI files say what the matrix says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generate() -> dict:
    return runpy.run_path(str(ROOT / "ci/generate.py"))


def test_generated_files_are_up_to_date(generate: dict) -> None:
    for path, text in generate["outputs"]().items():
        assert path.read_text() == text, f"run `python ci/generate.py` ({path.name})"


def test_every_row_has_a_job_and_a_line(generate: dict) -> None:
    matrix = generate["rows"]()
    workflow, table = generate["workflow"](matrix), generate["coverage"](matrix)
    for row in matrix:
        assert f"nox -s {row['name']}\n" in workflow
        assert f"`{row['name']}`" in table


def test_no_row_claims_more_than_it_shows(generate: dict) -> None:
    for row in generate["rows"]():
        assert row["evidence"]
        if row["backend"] == "rocm":
            assert row["proof"] != "executed", "no AMD hardware has run these tests"
