"""docs/collective-programs.md followed to the letter: its program runs on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.pages import python_blocks


def test_the_program_of_the_page_on_two_ranks(tmp_path: Path) -> None:
    program = python_blocks("collective-programs.md")[0]
    (tmp_path / "two_shot.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "two_shot.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    total = str((np.arange(8.0) + np.arange(8.0) + 1).tolist())
    assert done.stdout.splitlines()[-2:] == [total, total]
