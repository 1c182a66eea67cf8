"""The code blocks of docs/generate.md run unchanged on a small checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chat_templates import TURNS
from tests.checkpoints import make_checkpoint
from tests.pages import python_blocks


def test_programs_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(
        tmp_path / "checkpoint", layers=1, hidden=32, intermediate=48, head_dim=8
    )
    (folder / "chat_template.jinja").write_text(TURNS)
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks("generate.md")
    assert len(blocks) == 5
    exec("\n".join(blocks), {})
    assert len(capsys.readouterr().out.splitlines()) >= 5
