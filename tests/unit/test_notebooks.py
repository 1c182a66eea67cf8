"""The notebooks run from the first cell to the last, store no outputs and name their readers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ark

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[str]:
    return [
        "".join(c["source"])
        for c in json.loads(path.read_text())["cells"]
        if c["cell_type"] == kind
    ]


def test_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_text", "own_op"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    space: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(path, "code"), 1):
        *body, last = cell.splitlines()
        exec(compile(cell, f"{path.name}, cell {number}", "exec"), space)
        assert body or last
    out = capsys.readouterr().out
    assert len(out.split()) > 3
    ark.init()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_clean_and_names_its_readers(path: Path) -> None:
    book = json.loads(path.read_text())
    assert book["nbformat"] == 4 and len({cell["id"] for cell in book["cells"]}) == len(
        book["cells"]
    )
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in book["cells"])
    assert "\nFor those who " in cells(path, "markdown")[0]
