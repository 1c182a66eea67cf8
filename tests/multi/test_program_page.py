"""docs/collective-programs.md followed literally: its program runs and is simulated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ark.cli import main
from tests.pages import commands, python_blocks, shown


def test_program_of_the_page_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = python_blocks("collective-programs.md")[0]
    (tmp_path / "two_shot.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "two_shot.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    total = str((np.arange(8.0) + np.arange(8.0) + 1).tolist())
    assert done.stdout.splitlines()[-2:] == [total, total]
    ((words, lines),) = (c for c in commands("collective-programs.md") if "simulate" in c[0])
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    text = capsys.readouterr().out
    assert shown(lines, text), text
