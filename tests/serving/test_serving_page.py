"""docs/serving.md: its program runs on the shipped checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import python_blocks

ROOT = Path(__file__).resolve().parents[2]


def test_program_of_the_page_reports_every_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoint").symlink_to(ROOT / "examples/noah")
    monkeypatch.chdir(tmp_path)
    (block,) = python_blocks("serving.md")
    exec(block.replace("context=2048", 'context=64, backend="cpu"').replace("=64)", "=4)"), {})
    events = re.findall(r"Event\(id='first', tokens=\(([\d, ]*)\)", capsys.readouterr().out)
    assert sum(len(re.findall(r"\d+", tokens)) for tokens in events) == 4
